"""Defines the pieces of a run: a request of the user, a text or a call of the agent, or the result of a tool."""

import re
from collections.abc import Container, Iterable
from typing import Any, Final, Literal, NamedTuple

from kp_scorer.adapters.node import Node, as_json, keys_by_plain_name, parsed
from kp_scorer.adapters.roles import Speaker

_ERROR: Final = re.compile(
    r"\s*(?:Traceback \(most recent call last\)|(?:[\w.]*(?:Error|Exception)|(?i:error|exception))\b[^\n:]{0,60}:)"
)
_EXIT: Final = re.compile(
    r"^[\[(<]?[\w' ]{0,40}\b(?:exit(?:ed)?(?: with)?(?: code| status)|returncode|return code|exit_code)\W{1,3}[1-9]",
    re.MULTILINE | re.I,
)
"""Matches a line of a result with the exit code of a command that failed."""
_EXIT_CODES: Final = ("exitcode", "returncode", "exitstatus")
_EXIT_CHARS: Final = 300  # Exit codes are searched for in this many characters at either end.
ERROR_KEYS: Final = ("error", "isError", "is_error")
_FAILURES: Final = ("error", "failed", "failure", "output-error")


class Piece(NamedTuple):
    """A piece of a run: the user asks something, the agent says something or calls a tool, or a tool returns something."""

    node: Node
    kind: Literal["user", "agent", "call", "result"]
    text: str = ""  # The text of the piece; that of a call is empty unless the agent wrote the call into its text.
    name: str = ""  # The name of the tool.
    arguments: Any = None  # In the form of the source: JSON, or a text that mostly is JSON.
    call_id: str = ""
    latency_ms: float | None = None
    is_error: bool = False  # True if the source marks a result as an error.


def free_call_id(number: int, taken: Container[str]) -> str:
    """Return an unused id for the call with this number in its run."""
    call_id = f"call_{number}"
    while call_id in taken:
        call_id += "_"
    return call_id


def utterance(node: Node, kind: Speaker, text: str) -> list[Piece]:
    """Return a text as a list of one piece; an empty list if it is blank."""
    return [Piece(node, kind, text)] if text.strip() else []


def has_kind(pieces: Iterable[Piece], *kinds: str) -> bool:
    """Return whether any of the pieces is of one of these kinds."""
    return any(piece.kind in kinds for piece in pieces)


def is_failure(fields: dict[str, Any]) -> bool:
    """Return whether the fields of a result mark it as an error."""
    is_marked = any(fields.get(key) is True for key in ERROR_KEYS) or fields.get("success") is False
    return is_marked or _has_exit_code(fields) or any(fields.get(key) in _FAILURES for key in ("status", "state"))


def _has_exit_code(fields: object) -> bool:
    """Return whether a field of an object is the exit code of a command that failed."""
    if not isinstance(fields, dict):
        return False
    codes = [fields[key] for name, key in keys_by_plain_name(fields).items() if name in _EXIT_CODES]
    return any(isinstance(code, int | str) and str(code).strip("-0").isdecimal() for code in codes)


def is_error(result: Piece) -> bool:
    """Return whether a result is an error, as ``worker/CONVERT.md`` defines it."""
    if result.is_error or _ERROR.match(result.text):
        return True
    if any(_EXIT.search(part) for part in (result.text[:_EXIT_CHARS], result.text[-_EXIT_CHARS:])):
        return True
    content = parsed(result.text)
    if not isinstance(content, dict):
        return False
    return any(content.get(key) for key in ERROR_KEYS) or any(map(_has_exit_code, (content, content.get("metadata"))))


def call_input(call: Piece) -> dict[str, Any] | None:
    """Return the arguments of a call as an object; other arguments become its field ``arguments``; None if there are none."""
    content = parsed(call.arguments)
    if content is None or isinstance(content, dict):
        return content
    return {"arguments": content} if content != "" else {}


def call_text(call: Piece) -> str:
    """Return a call as a text: the agent's own words, or the name of the tool with the arguments in brackets."""
    if call.text:
        return call.text
    arguments = parsed(call.arguments)
    arguments_text = arguments if isinstance(arguments, str) else "" if arguments is None else as_json(arguments)
    return f"{call.name}({arguments_text})"
