"""Conversations of the command lines of Amazon Q Developer and Kiro, as ``/save`` writes them.

Each turn of ``history`` is the input of the model and its answer: a pair, or in later versions an object. An input is keyed by
its kind (``Prompt``, ``ToolUseResults`` or ``CancelledToolUses``), and so is an answer (``Response`` or ``ToolUse``).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.blocks import result_of, text_in
from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import pieces_of_message
from kp_scorer.adapters.node import Node, objects_in
from kp_scorer.adapters.pieces import Piece, utterance
from kp_scorer.adapters.times import first_timestamp

_ANSWERS: Final = {"Response", "ToolUse"}


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a conversation."""
    turns = value["history"] if isinstance(value.get("history"), list) else []
    answers = [turn[-1] for turn in turns if isinstance(turn, list) and turn]
    answers += [turn.get("assistant") for turn in objects_in(turns)]
    return any(_ANSWERS & set(answer) for answer in objects_in(answers))


def run(_own_id: str, conversations: Sequence[Node]) -> Run:
    """Make a run of a conversation."""
    (conversation,) = conversations
    turns = [_halves(turn) for turn in conversation.at("history").items()]
    pieces = [piece for request, answer in turns for piece in (*_pieces_of_input(request), *_pieces_of_answer(answer))]
    own_id = trace_id("amazon-q", conversation.at("conversation_id").text(), conversation.value)
    return Run(conversation, own_id, pieces, first_timestamp(request for request, _ in turns), framework="amazon-q")


def _halves(turn: Node) -> tuple[Node, Node]:
    if not isinstance(turn.value, list):
        return turn.at("user"), turn.at("assistant")
    if len(turn.value) != 2:
        raise turn.refusal("expected the input of the model, and its answer")
    request, answer = turn.items()
    return request, answer


def _pieces_of_input(request: Node) -> Iterator[Piece]:
    content = request.at("content")
    for kind in content.object():
        for result in content.at(kind, "tool_use_results").items():
            # The key of each block is its kind, too.
            texts = (text_in(text) for block in result.at("content").items() for text in block.object().values())
            piece = result_of(result, result._replace(value="\n".join(texts)))
            yield piece._replace(is_error=piece.is_error or result.at("status").value == "Error")
        yield from utterance(content, "user", content.at(kind, "prompt").text())


def _pieces_of_answer(answer: Node) -> Iterator[Piece]:
    for kind in answer.object():
        said = answer.at(kind)
        fields = {"role": "assistant", "content": said.at("content").value, "tool_calls": said.at("tool_uses").value}
        yield from pieces_of_message(said._replace(value=fields))


FORMAT = Format(fits, run)
