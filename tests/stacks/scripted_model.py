"""A model that calls the tool that it is offered, once, and then answers: by the protocols of OpenAI and of Gemini."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Final

ANSWER: Final = "High water at Esbjerg is at 04:12 and at 16:40."
TOOL: Final = "tide_table"
INPUT: Final = {"port": "Esbjerg"}


def completion(is_answer: bool) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": TOOL, "arguments": json.dumps(INPUT)}}
    message = (
        {"role": "assistant", "content": ANSWER} if is_answer else {"role": "assistant", "content": None, "tool_calls": [call]}
    )
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop" if is_answer else "tool_calls"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
    }


def response(is_answer: bool) -> dict[str, Any]:
    text_part = {"type": "output_text", "text": ANSWER, "annotations": []}
    item = (
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [text_part]}
        if is_answer
        else {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": TOOL, "arguments": json.dumps(INPUT)}
    )
    details = {
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": f"resp_{int(is_answer)}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "scripted",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 9, "output_tokens": 9, "total_tokens": 18, **details},
    }


def content(is_answer: bool) -> dict[str, Any]:
    part = {"text": ANSWER} if is_answer else {"functionCall": {"name": TOOL, "args": INPUT}}
    return {"candidates": [{"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}]}


ROUTES: Final = {
    "/chat/completions": (completion, '"tool_call_id"'),
    "/responses": (response, '"function_call_output"'),
    ":generateContent": (content, '"functionResponse"'),
}
"""By the end of a path: the answer there, and the text in a request that shows that the tool was called."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = self.rfile.read(int(self.headers["Content-Length"])).decode()
        path = self.path.partition("?")[0]
        answer, mark = next(route for end, route in ROUTES.items() if path.endswith(end))
        body = json.dumps(answer(mark in request)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def scripted_model() -> Iterator[str]:
    """Serve the model; yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
