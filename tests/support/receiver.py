"""A receiver of decisions in a process of its own: ``python -m tests.support.receiver PORT FILE STATUS ANSWER``.

It appends the path, the headers and the body of each request to FILE, with a character for each byte of the body, and answers
with STATUS and with ANSWER, which is in hexadecimal. It drops every third request.
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
