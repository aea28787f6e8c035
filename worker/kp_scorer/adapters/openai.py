"""OpenAI's conversations: the messages of Chat Completions, and the items of the Responses API.

A source is an object with ``messages``, and with ``choices`` where the answer was recorded beside its request; an object with
``input`` and ``output``, as what is sent to the Responses API and what comes back have them; or a list of messages or items
alone.

Specifications: https://platform.openai.com/docs/api-reference/chat/create, where ``messages`` are described, and
https://platform.openai.com/docs/api-reference/responses/object; both are generated from
https://github.com/openai/openai-openapi.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from kp_scorer.adapters.building import Run, moment, trace_id
from kp_scorer.adapters.chat import called, is_message, pieces_of, pieces_of_message
from kp_scorer.adapters.pieces import Called, Piece, Returned, Said, spoken, text_in
from kp_scorer.adapters.source import Node
from kp_scorer.errors import NotConverted

_BESIDE_A_CALL = frozenset({"id", "call_id", "type", "status", "caller", "namespace"})
"""Fields of an item that are not what a built-in tool was called with."""


def runs(sources: Iterable[Node]) -> Iterator[Run | NotConverted]:
    """One run for each conversation, in the order of the input."""
    for source in sources:
        for conversation in _conversations(source):
            try:
                yield _run(conversation)
            except NotConverted as error:
                yield error


def _conversations(source: Node) -> list[Node]:
    """The conversations in a source: several, if it is a list of what is neither message nor item."""
    if not isinstance(source.value, list) or any(is_message(item) or _is_item(item) for item in source.value):
        return [source]
    return source.items()


def _is_item(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _run(conversation: Node) -> Run:
    created_at = None
    if isinstance(conversation.value, list):
        pieces = list(_items(conversation))
    elif conversation.at("messages").value is not None:
        # Of several answers to one request the first is what a client takes.
        answers = [choice.at("message") for choice in conversation.at("choices").items()[:1]]
        pieces = list(pieces_of([*conversation.at("messages").items(), *answers]))
    elif conversation.at("input").value is not None or conversation.at("output").value is not None:
        pieces = [*_items(conversation.at("input")), *_items(conversation.at("output"))]
        created = conversation.at("created_at")
        if (seconds := created.number()) is not None:
            created_at = moment(created, _microseconds(created, seconds))
    else:
        raise conversation.refusal("expected a list of messages, or an object with messages, or with input and output")
    return Run(conversation, trace_id("openai", None, conversation.value), pieces, created_at)


def _microseconds(node: Node, seconds: float) -> int:
    try:
        return int(seconds * 1_000_000)
    except (OverflowError, ValueError):
        raise node.refusal("expected seconds since 1970") from None


def _items(node: Node) -> Iterator[Piece]:
    if isinstance(node.value, str):
        # What is asked for may be a text alone.
        yield from pieces_of_message(node._replace(value={"role": "user", "content": node.value}))
        return
    for item in node.items():
        yield from _item(item)


def _item(item: Node) -> Iterator[Piece]:
    """What an item says. Those that are neither a message, a thought, a call nor an output say nothing."""
    if is_message(item.value):
        yield from pieces_of_message(item)
        return
    kind, call_id = item.at("type").required_text(), item.first("call_id", "id").text()
    match kind:
        case "reasoning":
            parts = [*item.at("summary").items(), *item.at("content").items()]
            yield from spoken(Said, item, text_in([part.value for part in parts]) if parts else "")
        case "function_call":
            yield called(item, item, "arguments", call_id)
        case "custom_tool_call":
            yield called(item, item, "input", call_id)
        case "mcp_call":
            yield called(item, item, "arguments", call_id)
            error, output = item.at("error"), item.at("output")
            if error.value is not None or output.value is not None:
                result = output if error.value is None else error
                yield Returned(item, text_in(result.value), call_id, is_error=error.value is not None)
        case _ if kind.endswith("_call_output"):
            yield Returned(item, text_in(item.at("output").value), call_id)
        case _ if kind.endswith("_call"):
            yield Called(item, kind.removesuffix("_call"), _own_fields(item, kind), call_id)


def _own_fields(item: Node, kind: str) -> dict[str, Any]:
    """What the call of a tool that OpenAI runs itself has of its own; the images that some make are left out."""
    found = {key: value for key, value in item.object().items() if key not in _BESIDE_A_CALL}
    if kind == "image_generation_call":
        found.pop("result", None)
    elif kind == "code_interpreter_call" and isinstance(outputs := found.get("outputs"), list):
        found["outputs"] = [each for each in outputs if not (isinstance(each, dict) and each.get("type") == "image")]
    return found
