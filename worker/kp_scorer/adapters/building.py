"""From the pieces of a run to a trace: its id, its objective, its steps and how it ended."""

import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final, NamedTuple

from kp_scorer.adapters.pieces import Asked, Called, Piece, Returned, Said, call_input, call_text, is_error
from kp_scorer.adapters.source import Node, as_json
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import InvalidTrace, NotConverted, Problem
from kp_scorer.trace import TRACE_ID_PREFIX, is_trace_id

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Given(NamedTuple):
    """What every trace needs and whoever converts must say, as no format does."""

    confidence: float
    task_domain: str
    visibility: str
    privacy_level: str
    success: bool | None = None
    """For runs whose source does not say whether they succeeded."""
    created_at: str | None = None
    """For runs whose source does not say when they were."""


class Run(NamedTuple):
    """One agent run, as a source of another format tells it. What that does not say is None."""

    node: Node
    """Where it stands."""
    trace_id: str
    pieces: Sequence[Piece]
    created_at: str | None = None
    success: bool | None = None
    framework: str | None = None
    answer: Node | None = None
    """What the run put out in the end, where the format has a place for that."""


def trace_id(kind: str, own: str | None, content: object) -> str:
    """The id of a run: its own, if that may stand in one, otherwise made of a digest of its source; each time the same."""
    if own and is_trace_id(found := f"{TRACE_ID_PREFIX}{kind}:{own}"):
        return found
    digest = hashlib.blake2b(as_json(content).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{TRACE_ID_PREFIX}{kind}:{digest}"


def moment(node: Node, microseconds: int) -> str:
    """The time so long after the beginning of 1970, as ISO 8601 in UTC; raises NotConverted if no calendar has it."""
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).isoformat()
    except OverflowError:
        raise node.refusal("expected a time before the year 10000") from None


def trace_of(run: Run, given: Given, limits: Limits) -> dict[str, Any]:
    """Make a trace, as JSON, that passes :func:`~kp_scorer.decoding.decode_trace`.

    The objective is the first that was asked, the result the last that was said; without a word, what was returned last.

    Raises:
        NotConverted: there is no objective, no step or no result; something that the source lacks is not given either; or the
            trace is over a limit.
    """
    objective = next((piece for piece in run.pieces if isinstance(piece, Asked)), None)
    if objective is None:
        raise run.node.refusal("expected something that a user asked for: it is the objective")
    done = [piece for piece in run.pieces if piece is not objective]
    if not done:
        raise run.node.refusal("expected something that the agent said or did: those are the steps")
    answer, result = _result(run, done)
    trace = {
        "@context": "https://openknowledgepulse.org/schema/v1",
        "@type": "ReasoningTrace",
        "id": run.trace_id,
        "metadata": _metadata(run, given),
        "task": {"objective": objective.text},
        "steps": _steps(done),
        "outcome": {"result_summary": result, "confidence": given.confidence},
    }
    try:
        decode_trace(trace, limits)
    except InvalidTrace as error:
        places = {"task": objective.node, "outcome": answer} | {f"steps.{n}": piece.node for n, piece in enumerate(done)}
        raise _in_the_source(run.node, error, places) from None
    return trace


def _metadata(run: Run, given: Given) -> dict[str, Any]:
    created_at = run.created_at or given.created_at
    success = given.success if run.success is None else run.success
    missing = []
    if created_at is None:
        missing.append(Problem("metadata.created_at", "expected --created-at, as the source does not say when it was"))
    if success is None:
        missing.append(Problem("metadata.success", "expected --success or --failed, as the source does not say which"))
    if missing:
        raise NotConverted(run.node.line, missing)
    metadata = {
        "created_at": created_at,
        "task_domain": given.task_domain,
        "success": success,
        "visibility": given.visibility,
        "privacy_level": given.privacy_level,
    }
    return metadata | ({"framework": run.framework} if run.framework else {})


def _result(run: Run, done: Sequence[Piece]) -> tuple[Node, str]:
    if run.answer and run.answer.text().strip():
        return run.answer, run.answer.text()
    for kind in (Said, Returned):
        for piece in reversed(done):
            if isinstance(piece, kind):
                return piece.node, piece.text
    raise run.node.refusal("expected something that the agent said, or that a tool returned: the last is the result")


def _steps(done: Sequence[Piece]) -> list[dict[str, Any]]:
    steps = [{"step_id": number} | _step(piece) for number, piece in enumerate(done)]
    for number in _recoveries(done):
        steps[number]["type"] = "error_recovery"
    return steps


def _step(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Said):
        return {"type": "thought", "content": piece.text}
    if not isinstance(piece, Called):
        return {"type": "observation", "content": piece.text}
    step = {"type": "tool_call", "content": call_text(piece), "tool": {"name": piece.name}}
    arguments = call_input(piece.arguments)
    return (
        step
        | ({"input": arguments} if arguments is not None else {})
        | ({"latency_ms": piece.latency_ms} if piece.latency_ms is not None else {})
    )


def _recoveries(done: Sequence[Piece]) -> Iterator[int]:
    """The places of the steps that answer an error.

    All that the agent does until something is returned or asked is one turn. If one of the results before it is an error and a
    tool is called in it, its first step is a recovery. A turn in which no tool is called tries nothing again.
    """
    after_error = False
    for is_turn, numbered in groupby(enumerate(done), key=lambda each: isinstance(each[1], Said | Called)):
        pieces = list(numbered)
        if is_turn and after_error and any(isinstance(piece, Called) for _, piece in pieces):
            yield pieces[0][0]
        after_error = not is_turn and any(isinstance(piece, Returned) and is_error(piece) for _, piece in pieces)


def _in_the_source(origin: Node, error: InvalidTrace, places: dict[str, Node]) -> NotConverted:
    """Say of the source what is wrong with the trace made of it: nobody sees that."""
    found = []
    for field, expected in error.problems:
        parts = field.split(".")
        node = places.get(".".join(parts[:2])) or places.get(parts[0])
        if node is None and field != "$":
            expected = f"{field}: {expected}"
        found.append((node or origin).refusal(expected))
    line = found[0].line
    # A text may be a step and the result as well.
    return NotConverted(line, list(dict.fromkeys(problem for each in found if each.line == line for problem in each.problems)))
