"""A receiver of decisions, a process of its own: ``python -m tests.support.receiver PORT FILE STATUS ANSWER``.

It appends path, headers and body of each request to a file, each byte of a body as a character, and answers with the status
and the body ANSWER, in hexadecimal; every third request it drops.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PORT, FILE, STATUS, ANSWER = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])


class Handler(BaseHTTPRequestHandler):
    requests = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode("latin-1")
        Handler.requests += 1
        if Handler.requests % 3 == 0:
            self.close_connection = True
            return
        with FILE.open("a") as file:
            file.write(json.dumps({"path": self.path, "body": body, **{k.lower(): v for k, v in self.headers.items()}}) + "\n")
            os.fsync(file.fileno())
        self.send_response(STATUS)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
