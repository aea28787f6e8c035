"""Conversations of OpenAI: the messages of Chat Completions, and the items of the Responses API.

A source is an object with ``messages``, and with ``choices`` where the answer is recorded beside its request; an object with
``input`` and ``output``, which are the fields of the Responses API; a log with ``request`` and ``response``; a line of a batch,
whose other half has the same ``custom_id``; or a list of messages or items alone. Requests to models of Anthropic and Gemini,
and their answers, are read from the same fields.

Specifications: https://platform.openai.com/docs/api-reference/chat/create and
https://platform.openai.com/docs/api-reference/responses/object.
"""

from collections.abc import Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, moment, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import Piece, Speaker, Transcript, is_message, pieces_in, pieces_of, pieces_of_message
from kp_scorer.adapters.node import Node, objects_in

_KEYS: Final = frozenset({"messages", "contents", "choices", "candidates", "request", "response", "prompt", "custom_id"})


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a conversation, a message or an item."""
    is_of_responses = any(isinstance(value.get(key), list) for key in ("input", "output")) or {"input", "output"} <= set(value)
    return bool(_KEYS & set(value)) or is_of_responses or is_message(value)


def run_id(conversation: Node) -> str | None:
    """Return the id that a request of a batch shares with its response; None for a conversation that is in no batch."""
    value = conversation.value
    return conversation.at("custom_id").text() or None if isinstance(value, dict) and "custom_id" in value else None


def ends(conversations: Sequence[Node]) -> int | None:
    """Return 0 once both halves of a conversation of a batch are there, or one half twice, which makes it ambiguous."""
    return 0 if len(conversations) > 1 or {"body", "response"} <= set(conversations[0].object()) else None


def records(source: Node) -> list[Node]:
    """Return the conversations in a source: several if it is a list that holds neither messages nor items."""
    is_alone = any(is_message(each) or isinstance(each.get("type"), str) for each in objects_in(source.value))
    return [source] if is_alone else source.each()


def run(_own_id: str, conversations: Sequence[Node]) -> Run:
    """Make a run of a conversation."""
    conversation = conversations[0]
    if len(conversations) > 1:
        if any(sum(half in each.object() for each in conversations) > 1 for half in ("body", "response")):
            raise conversation.refusal("expected one request and one response of its custom_id: give each batch by itself")
        conversation = conversation._replace(value={key: each.value[key] for each in conversations for key in each.object()})
    if isinstance(conversation.value, list):
        pieces = list(pieces_of(conversation.items()))
        return Run(conversation, trace_id("openai", "", conversation.value), pieces)
    request, response = _body(conversation, "request"), _body(conversation, "response")
    question, answer = _first(request, "messages", "input"), _first(response, "choices", "output", "candidates")
    pieces = _pieces(question, "user")
    if answer is not response and answer.path.endswith("choices"):
        # Clients use the first of several choices.
        pieces += [piece for choice in answer.items()[:1] for piece in pieces_of_message(choice.at("message"))]
    elif answer is not conversation:
        pieces += _pieces(answer, "agent")
    if not pieces:
        raise conversation.refusal("expected a list of messages, or an object with messages, or with input and output")
    time = (response if isinstance(response.value, dict) else conversation).first("created_at", "created")
    created_at = None if (seconds := time.number()) is None else moment(time, seconds * 1_000_000)
    return Run(conversation, trace_id("openai", "", conversation.value), pieces, created_at)


def _body(conversation: Node, key: str) -> Node:
    """Return the request or the response in a log or in the body of a batch; without one, the conversation itself."""
    message = conversation.at(key).parsed()
    message = conversation if message.value is None else message
    body = message.at("body").parsed() if isinstance(message.value, dict) else message
    return body if isinstance(body.value, dict) else message


def _first(message: Node, *keys: str) -> Node:
    value = message.first(*keys) if isinstance(message.value, dict) else message
    return message if value.value is None else value


def _pieces(node: Node, speaker: Speaker) -> list[Piece]:
    """Return the pieces in a question or an answer; raise NotConverted where a list of them holds no message."""
    content = node.parsed()
    items = content.value if isinstance(content.value, list) else []
    if node.path.endswith("messages") and not any(isinstance(item, str | list) for item in items):
        return [piece for message in content.items() for piece in pieces_of_message(message)]
    pieces = pieces_in(content, speaker, Transcript(), is_model=True)
    return list(pieces_of(node.items() if isinstance(node.value, list) else [])) if pieces is None else pieces


FORMAT = Format(fits, run, records, run_id, ends=ends, is_general=True, has_chats=True, has_ids_of_files=True)
