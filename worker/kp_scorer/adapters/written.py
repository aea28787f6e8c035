"""Reads the calls that a model writes into its text because no interface takes them. A run follows one of several protocols.

- ``<function=NAME><parameter=KEY>…``, and ``<invoke name="NAME"><parameter name="KEY">…``, of OpenHands and Anthropic
- ``<tool_call>{"name": …, "arguments": …}</tool_call>`` of Hermes and Qwen, and Glaive's ``<functioncall>``, up to the end
- ``Action: NAME`` with ``Action Input: …`` of ReAct, and ``Function Name: NAME`` of BeeAI, which writes the result behind it
- ``[[ ## next_tool_name ## ]]`` among the other sections of DSPy, whose names are not part of what is said
- ``<NAME><KEY>…</KEY></NAME>`` of Cline, whose results begin with ``[NAME] Result:``
- ``[NAME(KEY="…"), …]`` of ToolACE
- one fenced command, of an agent that acts by it: the next message of the user has the output of the command

The next message of the user is the result of such a call.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

from kp_scorer.adapters.pieces import Piece, has_kind, utterance

_TAG: Final = re.compile(
    r"<(?:(?P<kind>function|invoke)(?:=| name=\")(?P<name>[\w.:/-]{1,100})\"?>|(?P<json>tool_call|function_?call)>\s*+(?=\{))"
)
_QUOTED: Final = re.compile(r"\s*+\{\s*+\"name\":\s*+\"([^\"]{1,100})\",\s*+\"arguments\":\s*+'(.*)'\s*+\}\s*+", re.DOTALL)
"""Matches a call of Glaive, whose arguments are JSON in single quotes, which JSON itself lacks."""
_PARAMETER: Final = re.compile(r"<(?:parameter=|parameter name=\")([\w.:/-]{1,100})\"?>")
_ACTION: Final = re.compile(
    r"^[ \t]*+(?:Action|Function Name):[ \t]*+([\w.:/ -]{1,100}?)"
    r"(?:[ \t]*+\n[ \t]*+(?:Action|Function)[ _]Input:[ \t]*+|\[([^\]\n]{0,2000})\][ \t]*+$)",
    re.MULTILINE,
)
_LISTED: Final = re.compile(r"\s*+\[[^\[\]()]{1,100}\(.*\)\]\s*+", re.DOTALL)
_LISTED_CALL: Final = re.compile(r"[\[,]\s*+([^\[\](),=]{1,100})\(((?:[^()\"']|\"[^\"]*+\"|'[^']*+')*+)\)")
_LISTED_ARGUMENT: Final = re.compile(r"([\w-]{1,100})=(\"[^\"]*+\"|'[^']*+'|[^,]++)")
_OBSERVATION: Final = re.compile(r"\n[ \t]*+(?:Observation|(Function Output)):")
_SECTION: Final = re.compile(r"^[ \t]*+\[\[ ## (\w{1,100}) ## \]\][ \t]*+$", re.MULTILINE)
_SECTIONS_OF_CALLS: Final = ("next_tool_name", "next_tool_args")
_NOT_SAID: Final = (*_SECTIONS_OF_CALLS, "completed")
_FINAL: Final = "Final Answer:"
_FENCE: Final = re.compile(r"```(?:bash|sh|shell|mswea_bash_command)?+[ \t]*+\n")
_RETURNED: Final = re.compile(
    r"\s*+(?:<returncode>|<output>|<tool_response>|\[?(?:observation|the output of the|execution result|output|exit code)\b)",
    re.I,
)
"""Matches the beginning of a message with the output of a command."""
_PROMPT: Final = "bash-$"
_TOOL_OF_RESULT: Final = re.compile(r"\[([a-z_]{1,60})(?: for [^\n]{0,500})?\] Result:\s?")
_ELEMENT: Final = re.compile(r"<([a-z_]{1,60})>")
_MOST_ELEMENTS: Final = 50
_ENDING: Final = "attempt_completion"
_LABEL: Final = re.compile(r"\s*+observation:\s*+", re.I)
_RESPONSE: Final = ("<tool_response>", "</tool_response>")
_AROUND: Final = re.compile(r"</?(?:tool_call|function_calls?)>")


def with_written_calls(pieces: Sequence[Piece], *, acts_by_fences: bool = False) -> Sequence[Piece]:
    """Return the pieces of a run with the calls that the agent wrote into its texts, and with their results, as pieces.

    A run that has other calls is returned unchanged, except for sections of DSPy. With ``acts_by_fences``, each fenced command
    is a call even if no reply looks like its output.
    """
    are_called = has_kind(pieces, "call")
    pieces = [each for piece in pieces for each in _sections(piece, are_called=are_called)]
    if has_kind(pieces, "call"):
        return pieces
    replies = [(first.text, then.kind, then.text) for first, then in pairwise(pieces) if first.kind == "agent"]
    if any(kind == "user" and _TOOL_OF_RESULT.match(reply) for _, kind, reply in replies):
        return list(_elements(pieces))
    texts = [piece.text for piece in pieces if piece.kind == "agent"]
    if any(map(_TAG.search, texts)):
        find = _tagged
    elif any(map(_ACTION.search, texts)):
        find = _actions
    elif any(kind == "result" and _LISTED.fullmatch(text) for text, kind, _ in replies):
        find = _listed
    elif acts_by_fences or any(kind == "user" and _FENCE.search(text) and _is_output(reply) for text, kind, reply in replies):
        find = _fenced
    else:
        return pieces
    read: list[Piece] = []
    has_called = False
    for piece in pieces:
        if piece.kind == "agent":
            parts = list(find(piece))
            has_called = parts[-1].kind == "call" if parts else has_called
            read += parts
        elif piece.kind == "result" or has_called:
            read += _results(piece)
            has_called = False
        else:
            read.append(piece)
    return read


def _is_output(text: str) -> bool:
    return bool(_RETURNED.match(text)) or text.endswith(_PROMPT)


def _thought(piece: Piece, text: str) -> list[Piece]:
    return utterance(piece.node, "agent", _AROUND.sub("", text).strip())


def _sections(piece: Piece, *, are_called: bool) -> Iterator[Piece]:
    """Yield the texts of the sections of DSPy, and the call in them, unless the run has calls as pieces."""
    before, *parts = _SECTION.split(piece.text) if piece.kind == "agent" else ("",)
    if not parts or before.strip():
        yield piece
        return
    sections = list(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))
    yield from (piece._replace(text=text) for key, text in sections if text and key not in _NOT_SAID)
    name, arguments = (dict(sections).get(key, "") for key in _SECTIONS_OF_CALLS)
    if name and not are_called:
        yield Piece(piece.node, "call", name=name, arguments=_json(arguments))


def _tagged(piece: Piece) -> Iterator[Piece]:
    text, place = piece.text, 0
    while tag := _TAG.search(text, place):
        yield from _thought(piece, text[place : tag.start()])
        closing = f"</{tag['kind'] or tag['json']}>"
        end = text.find(closing, tag.end())
        body = text[tag.end() : end if end >= 0 else len(text)]
        place = end + len(closing) if end >= 0 else len(text)
        if tag["name"]:
            call = {"name": tag["name"], "arguments": _parameters(body)}
        else:
            quoted = _QUOTED.fullmatch(body)
            call = {"name": quoted[1], "arguments": quoted[2]} if quoted else _json(body)
        if isinstance(call, dict) and isinstance(name := call.get("name"), str) and name:
            yield Piece(piece.node, "call", name=name, arguments=call.get("arguments", call.get("parameters")))
        else:
            yield from _thought(piece, body)
    yield from _thought(piece, text[place:])


def _elements(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Read calls as elements of XML, whose names the results repeat: ``<read_file><path>x</path></read_file>``."""
    called = False
    for piece, then in zip(pieces, [*pieces[1:], None], strict=True):
        result = _TOOL_OF_RESULT.match(piece.text) if piece.kind == "user" and called else None
        answer = _TOOL_OF_RESULT.match(then.text) if then and then.kind == "user" else None
        name = answer[1] if answer else _ENDING
        start = piece.text.find(f"<{name}>") if piece.kind == "agent" else -1
        called = start >= 0
        if called:
            end = piece.text.rfind(f"</{name}>")
            body = piece.text[start + len(name) + 2 : end if end > start else len(piece.text)]
            yield from _thought(piece, piece.text[:start])
            yield Piece(piece.node, "call", name=name, arguments=_children(body))
        else:
            yield piece._replace(kind="result", text=piece.text[result.end() :]) if result else piece


def _children(body: str) -> dict[str, str]:
    children: dict[str, str] = {}
    place = 0
    while (element := _ELEMENT.search(body, place)) and len(children) < _MOST_ELEMENTS:
        end = body.find(f"</{element[1]}>", element.end())
        place = end if end >= 0 else len(body)
        children[element[1]] = body[element.end() : place].strip()
    return children


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
        if action[2] is not None:
            place = action.end()
            yield Piece(piece.node, "call", name=action[1], arguments=action[2])
            continue
        # A model may go on and invent the observation itself.
        observed = _OBSERVATION.search(piece.text, action.end())
        place = observed.start() if observed else len(piece.text)
        yield Piece(piece.node, "call", name=action[1], arguments=_json(piece.text[action.end() : place]))
        if observed:
            if observed[1]:
                yield Piece(piece.node, "result", piece.text[observed.end() :].strip())
            return
    for text in piece.text[place:].rpartition(_FINAL)[::2]:
        yield from _thought(piece, text.strip().removeprefix("Thought:"))


def _listed(piece: Piece) -> Iterator[Piece]:
    if not _LISTED.fullmatch(piece.text):
        yield piece
        return
    for call in _LISTED_CALL.finditer(piece.text):
        arguments = {name[1]: _json(name[2].strip("'")) for name in _LISTED_ARGUMENT.finditer(call[2])}
        yield Piece(piece.node, "call", name=call[1].strip(), arguments=arguments)


def _fenced(piece: Piece) -> Iterator[Piece]:
    fence = _FENCE.search(piece.text)
    end = piece.text.find("\n```", fence.end() - 1) if fence else -1
    if fence is None or end < 0 or _FENCE.search(piece.text, end + 4):
        # Such an agent may give one command at a time: of several, none is carried out.
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
