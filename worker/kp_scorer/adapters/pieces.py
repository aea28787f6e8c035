"""What happens in an agent's run, in the order in which it happened: the words that all formats are brought to."""

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from kp_scorer.adapters.source import Node, as_json, parsed


class Asked(NamedTuple):
    """The user, or whoever stands in for one, says something."""

    node: Node
    text: str


class Said(NamedTuple):
    """The agent says something, to the user or to itself."""

    node: Node
    text: str


class Called(NamedTuple):
    """The agent calls a tool."""

    node: Node
    name: str
    arguments: Any
    """As the format has them: JSON, or a text that mostly is."""
    call_id: str = ""
    latency_ms: float | None = None
    text: str = ""
    """The call as the agent wrote it, where it wrote one."""


class Returned(NamedTuple):
    """A tool, or something else around the agent, answers."""

    node: Node
    text: str
    call_id: str = ""
    name: str = ""
    is_error: bool = False
    """Whether the format says that this is an error."""


Piece = Asked | Said | Called | Returned

_ERROR: Final = re.compile(
    r"\s*(?:Traceback \(most recent call last\)|(?:[\w.]*(?:Error|Exception)|(?i:error|exception))\b[^\n:]{0,60}:)"
)
_NO_TEXT: Final = ("computer_screenshot", "image_url", "input_image", "input_audio")
"""Types of parts that are an image or a sound, which may be a result alone."""
_ERROR_KEYS: Final = ("error", "isError", "is_error")


def is_error(returned: Returned) -> bool:
    """Whether a result is an error.

    It is if the format says so; if it begins with "Traceback (most recent call last)"; if it begins with "error" or
    "exception", in any case, or with a name that ends in "Error" or "Exception", and a colon follows in that line, after 60
    characters at most; and if it is a JSON object with ``error``, ``isError`` or ``is_error``, and nothing false, empty or
    null there.
    """
    if returned.is_error or _ERROR.match(returned.text):
        return True
    found = parsed(returned.text)
    return isinstance(found, dict) and any(found.get(key) for key in _ERROR_KEYS)


def call_input(arguments: object) -> dict[str, Any] | None:
    """A call's arguments as an object: what is none becomes the ``arguments`` of one."""
    found = parsed(arguments)
    if found is None or isinstance(found, dict):
        return found
    return {"arguments": found} if found != "" else {}


def call_text(called: Called) -> str:
    """A call as a text: as the agent wrote it, or the tool's name with its arguments in brackets."""
    if called.text:
        return called.text
    arguments = parsed(called.arguments)
    shown = arguments if isinstance(arguments, str) else "" if arguments is None else as_json(arguments)
    return f"{called.name}({shown})"


def text_in(value: object) -> str:
    """A result as a text: the texts of a list of parts one a line, nothing of an image or a sound, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        return "\n".join(text for part in value if (text := _text_of_part(part)))
    is_without_text = value is None or (isinstance(value, dict) and value.get("type") in _NO_TEXT)
    return "" if is_without_text else as_json(value)


def content_text(content: Node) -> str:
    """The text of a message's content, which is a text or a list of parts; parts that hold no text say nothing.

    Raises:
        NotConverted: it is neither.
    """
    if content.value is None or isinstance(content.value, str):
        return content.text()
    if not isinstance(content.value, list):
        raise content.refusal("expected a text or a list of parts")
    return "\n".join(text for part in content.value if (text := _text_of_part(part)))


def spoken(role: type[Asked] | type[Said], node: Node, text: str) -> Iterable[Piece]:
    """What is said, if anything is: a text without a word says nothing."""
    return [role(node, text)] if text.strip() else []


def _text_of_part(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    return next((text for key in ("text", "refusal") if isinstance(text := part.get(key), str)), "")
