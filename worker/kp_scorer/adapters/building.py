"""From the pieces of a run to a trace: its id, its objective, its steps and how it ended."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final, NamedTuple

from kp_scorer.adapters.messages import Piece, call_input, call_text, is_error
from kp_scorer.adapters.node import Node, as_json, parsed
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import InvalidTrace, NotConverted, Problem
from kp_scorer.trace import TRACE_ID_PREFIX, is_trace_id

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class SuppliedFields(NamedTuple):
    """The fields of every trace that no format has, as the caller supplies them."""

    confidence: float
    task_domain: str
    visibility: str
    privacy_level: str
    success: bool | None = None
    """For runs whose source does not say whether they succeeded."""
    created_at: str | None = None
    """For runs whose source does not say when they were."""


class Run(NamedTuple):
    """One agent run in a source. What the source lacks is None."""

    node: Node
    """Where it stands."""
    trace_id: str
    pieces: Sequence[Piece]
    created_at: str | None = None
    success: bool | None = None
    framework: str | None = None
    answer: Node | None = None
    """What the run put out in the end, where the format has a place for that."""


def trace_id(kind: str, own: str, content: object) -> str:
    """The id of a run: its own, if that may stand in one, otherwise made of a digest of its source; each time the same."""
    if own and is_trace_id(full := f"{TRACE_ID_PREFIX}{kind}:{own}"):
        return full
    digest = hashlib.blake2b(as_json(content).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{TRACE_ID_PREFIX}{kind}:{digest}"


def digests_of(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """For each piece a digest of all pieces up to it, which are the same whatever ids their calls have."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        content = as_json([piece.kind, piece.text.strip(), piece.name, parsed(piece.arguments)])
        digest.update(content.encode("utf-8", "surrogatepass"))
        yield digest.copy().digest()


def moment(node: Node, microseconds: int) -> str:
    """The time so long after the beginning of 1970, as ISO 8601 in UTC; raises NotConverted if no calendar has it."""
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).isoformat()
    except OverflowError:
        raise node.refusal("expected a time in the years 1 to 9999") from None


def trace_of(run: Run, supplied: SuppliedFields, limits: Limits) -> dict[str, Any]:
    """Make a trace, as JSON, that passes :func:`~kp_scorer.decoding.decode_trace`.

    The objective is the first message of the user, the result the last of the agent; without one, the last result of a tool.

    Raises:
        NotConverted: there is no objective, no step or no result; a field that the source lacks is not supplied either; or
            the trace is over a limit.
    """
    objective = next((piece for piece in run.pieces if piece.kind == "user"), None)
    if objective is None:
        raise run.node.refusal("expected something that a user asked for: it is the objective")
    pieces = [piece for piece in run.pieces if piece is not objective]
    if not pieces:
        raise run.node.refusal("expected something that the agent said or did: those are the steps")
    answer, result = _result(run, pieces)
    trace = {
        "@context": "https://openknowledgepulse.org/schema/v1",
        "@type": "ReasoningTrace",
        "id": run.trace_id,
        "metadata": _metadata(run, supplied),
        "task": {"objective": objective.text},
        "steps": _steps(pieces),
        "outcome": {"result_summary": result, "confidence": supplied.confidence},
    }
    try:
        decode_trace(trace, limits)
    except InvalidTrace as error:
        places = {"task": objective.node, "outcome": answer} | {f"steps.{n}": piece.node for n, piece in enumerate(pieces)}
        raise _in_the_source(run.node, error, places) from None
    return trace


def _metadata(run: Run, supplied: SuppliedFields) -> dict[str, Any]:
    created_at = run.created_at or supplied.created_at
    success = supplied.success if run.success is None else run.success
    missing = []
    if created_at is None:
        missing.append(Problem("metadata.created_at", "expected --created-at, as the source does not say when it was"))
    if success is None:
        missing.append(Problem("metadata.success", "expected --success or --failed, as the source does not say which"))
    if missing:
        raise NotConverted(run.node.line, missing)
    metadata = {
        "created_at": created_at,
        "task_domain": supplied.task_domain,
        "success": success,
        "visibility": supplied.visibility,
        "privacy_level": supplied.privacy_level,
    }
    return metadata | ({"framework": run.framework} if run.framework else {})


def _result(run: Run, pieces: Sequence[Piece]) -> tuple[Node, str]:
    if run.answer and run.answer.text().strip():
        return run.answer, run.answer.text()
    for kind in ("agent", "result"):
        for piece in reversed(pieces):
            if piece.kind == kind:
                return piece.node, piece.text
    raise run.node.refusal("expected something that the agent said, or that a tool returned: the last is the result")


def _steps(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    steps = [{"step_id": number} | _step(piece) for number, piece in enumerate(pieces)]
    for number in _recoveries(pieces):
        steps[number]["type"] = "error_recovery"
    return steps


def _step(piece: Piece) -> dict[str, Any]:
    if piece.kind != "call":
        return {"type": "thought" if piece.kind == "agent" else "observation", "content": piece.text}
    step = {"type": "tool_call", "content": call_text(piece), "tool": {"name": piece.name}}
    optional = {"input": call_input(piece), "latency_ms": piece.latency_ms}
    return step | {key: value for key, value in optional.items() if value is not None}


def _recoveries(pieces: Sequence[Piece]) -> Iterator[int]:
    """The places of the steps that answer an error.

    All that the agent does up to the next result or message of the user is one turn. If one of the results before it is an
    error and a tool is called in it, its first step is a recovery. A turn without a call tries nothing again.
    """
    after_error = False
    for is_turn, numbered in groupby(enumerate(pieces), key=lambda each: each[1].kind in ("agent", "call")):
        group = list(numbered)
        if is_turn and after_error and any(piece.kind == "call" for _, piece in group):
            yield group[0][0]
        after_error = not is_turn and any(piece.kind == "result" and is_error(piece) for _, piece in group)


def _in_the_source(origin: Node, error: InvalidTrace, places: dict[str, Node]) -> NotConverted:
    """The error by its place in the source, not in the trace, which the user does not see."""
    refusals = []
    for field, expected in error.problems:
        parts = field.split(".")
        node = places.get(".".join(parts[:2])) or places.get(parts[0])
        if node is None and field != "$":
            expected = f"{field}: {expected}"
        refusals.append((node or origin).refusal(expected))
    line = refusals[0].line
    # A text may be a step and the result as well.
    problems = (problem for refusal in refusals if refusal.line == line for problem in refusal.problems)
    return NotConverted(line, list(dict.fromkeys(problems)))
