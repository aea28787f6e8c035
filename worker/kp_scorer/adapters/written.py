"""Reads the calls that a model writes into its text, where no interface takes them: one protocol, and one piece for each call.

- ``<function=NAME><parameter=KEY>…``, and ``<invoke name="NAME"><parameter name="KEY">…``, of OpenHands and Anthropic
- ``<tool_call>{"name": …, "arguments": …}</tool_call>`` of Hermes and Qwen
- ``Action: NAME`` with ``Action Input: …`` of ReAct
- one fenced command, of an agent that acts by it: its next message of the user says what the command returned

What the user says next is then the result.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

from kp_scorer.adapters.messages import Piece

_TAG: Final = re.compile(
    r"<(?:(?P<kind>function|invoke)(?:=| name=\")(?P<name>[\w.:/-]{1,100})\"?>|(?P<json>tool_call|function_call)>\s*+(?=\{))"
)
_PARAMETER: Final = re.compile(r"<(?:parameter=|parameter name=\")([\w.:/-]{1,100})\"?>")
_ACTION: Final = re.compile(r"^[ \t]*+Action:[ \t]*+([\w.:/ -]{1,100}?)[ \t]*+\n[ \t]*+Action[ _]Input:[ \t]*+", re.MULTILINE)
_OBSERVATION: Final = re.compile(r"\n[ \t]*+Observation:")
_FINAL: Final = "Final Answer:"
_FENCE: Final = re.compile(r"```(?:bash|sh|shell|mswea_bash_command)[ \t]*+\n")
_RETURNED: Final = re.compile(
    r"\s*+(?:<returncode>|<output>|<tool_response>|\[?(?:observation|execution result|output|exit code)\b)", re.I
)
"""The beginning of a message that says what a command returned."""
_LABEL: Final = re.compile(r"\s*+observation:\s*+", re.I)
_RESPONSE: Final = ("<tool_response>", "</tool_response>")
_AROUND: Final = re.compile(r"</?(?:tool_call|function_calls?)>")


def with_written_calls(pieces: Sequence[Piece], *, acts_by_fences: bool = False) -> Sequence[Piece]:
    """Return the pieces of a run with the calls in the texts of an agent that makes no others, and with their results."""
    if any(piece.kind == "call" for piece in pieces):
        return pieces
    texts = [piece.text if piece.kind == "agent" else "" for piece in pieces]
    if any(map(_TAG.search, texts)):
        find = _tagged
    elif any(map(_ACTION.search, texts)):
        find = _actions
    elif acts_by_fences or _acts_by_fences(pieces):
        find = _fenced
    else:
        return pieces
    read: list[Piece] = []
    has_called = False
    for piece in pieces:
        if piece.kind == "agent":
            own = list(find(piece))
            has_called = own[-1].kind == "call" if own else has_called
            read += own
        elif piece.kind == "result" or has_called:
            read += _results(piece)
            has_called = False
        else:
            read.append(piece)
    return read


def _acts_by_fences(pieces: Sequence[Piece]) -> bool:
    return any(
        first.kind == "agent" and then.kind == "user" and _FENCE.search(first.text) and _RETURNED.match(then.text)
        for first, then in pairwise(pieces)
    )


def _thought(piece: Piece, text: str) -> list[Piece]:
    own = _AROUND.sub("", text).strip()
    return [piece._replace(text=own)] if own else []


def _tagged(piece: Piece) -> Iterator[Piece]:
    text, place = piece.text, 0
    while tag := _TAG.search(text, place):
        yield from _thought(piece, text[place : tag.start()])
        closing = f"</{tag['kind'] or tag['json']}>"
        end = text.find(closing, tag.end())
        body = text[tag.end() : end if end >= 0 else len(text)]
        place = end + len(closing) if end >= 0 else len(text)
        call = {"name": tag["name"], "arguments": _parameters(body)} if tag["name"] else _json(body)
        if isinstance(call, dict) and isinstance(name := call.get("name"), str) and name:
            yield Piece(piece.node, "call", name=name, arguments=call.get("arguments", call.get("parameters")))
        else:
            yield from _thought(piece, body)
    yield from _thought(piece, text[place:])


def _parameters(body: str) -> Any:
    names = list(_PARAMETER.finditer(body))
    if not names:
        return _json(body) if body.strip() else {}
    ends = [each.start() for each in names[1:]] + [len(body)]
    values = [body[name.end() : end].rpartition("</parameter>") for name, end in zip(names, ends, strict=True)]
    return {name[1]: (before or last).strip("\n") for name, (before, _, last) in zip(names, values, strict=True)}


def _json(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text.strip()


def _actions(piece: Piece) -> Iterator[Piece]:
    place = 0
    for action in _ACTION.finditer(piece.text):
        if action.start() < place:
            continue
        yield from _thought(piece, piece.text[place : action.start()].strip().removeprefix("Thought:"))
        # A model may go on and make up what it will observe.
        observed = _OBSERVATION.search(piece.text, action.end())
        place = observed.start() if observed else len(piece.text)
        yield Piece(piece.node, "call", name=action[1], arguments=_json(piece.text[action.end() : place]))
        if observed:
            return
    for text in piece.text[place:].rpartition(_FINAL)[::2]:
        yield from _thought(piece, text.strip().removeprefix("Thought:"))


def _fenced(piece: Piece) -> Iterator[Piece]:
    fence = _FENCE.search(piece.text)
    end = piece.text.find("\n```", fence.end() - 1) if fence else -1
    if fence is None or end < 0 or _FENCE.search(piece.text, end + 4):
        # Of several commands none is carried out.
        yield piece
        return
    yield from _thought(piece, piece.text[: fence.start()])
    yield Piece(piece.node, "call", name="bash", arguments={"command": piece.text[fence.end() : end]})


def _results(piece: Piece) -> Iterator[Piece]:
    """Yield the results in a message, which may hold one for each of several calls."""
    opening, closing = _RESPONSE
    for part in filter(str.strip, piece.text.split(closing)):
        text = part.strip().removeprefix(opening) if opening in part else part
        label = _LABEL.match(text)
        yield piece._replace(kind="result", text=text[label.end() :] if label else text.strip() if opening in part else text)
