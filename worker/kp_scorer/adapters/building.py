"""Makes a trace from the pieces of a run: its id, its objective, its steps and its outcome."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from kp_scorer.adapters.node import Node, as_json, field_at, parsed
from kp_scorer.adapters.pieces import Piece, call_input, call_text, has_kind, is_error
from kp_scorer.adapters.times import first_timestamp, time_of
from kp_scorer.characters import without_halves
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import FieldsMissing, InvalidTrace, NotConverted, Unfinished
from kp_scorer.limits import Limits
from kp_scorer.trace import TRACE_ID_PREFIX, Domain, Fraction, IsoDatetime, PrivacyLevel, Visibility, is_trace_id

_OPTIONS: Final = {  # For each field that sources may lack: its path in the trace, and the option that supplies it.
    "confidence": ("outcome.confidence", "--confidence"),
    "task_domain": ("metadata.task_domain", "--domain"),
    "created_at": ("metadata.created_at", "--created-at"),
    "success": ("metadata.success", "--success or --failed"),
}
_SUCCESSES: Final = ("true", "yes", "success", "passed", "resolved")
_FAILURES: Final = ("false", "no", "failure", "failed", "error")
_LEAST_SUCCESSFUL_NUMBER: Final = 0.5
_EXPECTED: Final = {
    "id": "a text or an integer that is the id",
    "success": "true or false, a number that is a success from 0.5, or a word such as passed or failed",
    "created_at": "an ISO 8601 date and time, or a number since 1970",
    "task_domain": "a text that is the domain",
    "confidence": "a number from 0 to 1",
}
_LAST_CALLS: Final = ("finish", "finalanswer", "submit", "complete", "attemptcompletion", "taskcomplete", "done", "agentfinish")
"""Names of tools by which an agent ends its run and gives its answer, reduced to their letters."""
_ANSWERS: Final = "final_answer answer message result final_thought summary response text output arguments".split()  # noqa: SIM905
_LEAST_CHARS: Final = 200  # Texts are not cut to fewer characters.
_OWN_IDS: Final = ("custom_id", "id", "session_id", "instance_id")
_PRINTABLE: Final = "".join(map(chr, range(ord("!"), ord("~") + 1))).replace("%", "")


class SuppliedFields(NamedTuple):
    """The fields of traces that sources lack: their values, or their places in each record."""

    confidence: Fraction | None
    task_domain: Domain | None
    visibility: Visibility
    privacy_level: PrivacyLevel
    success: bool | None = None  # Applies to runs whose source does not record it.
    created_at: IsoDatetime | None = None  # Applies to runs whose source does not record it.
    paths: Mapping[str, str] = MappingProxyType({})  # Dotted paths in a record to these fields and ``id``.
    defaults: Mapping[str, Callable[[int], Any]] | None = None
    """For each field that is assumed if neither the source nor the caller has it: a function of the run's line to its value."""


class Run(NamedTuple):
    """One agent run in a source. A field that the source lacks is None."""

    node: Node  # Its place in the source.
    trace_id: str
    pieces: Sequence[Piece]
    created_at: str | None = None
    success: bool | None = None
    framework: str | None = None
    answer: Node | None = None  # The final result, where the format has a field for it.
    record: object = None  # The object that the caller's paths lead into; None if it is the value of ``node``.
    records: Sequence[Node] = ()  # All records that the run was read from; they hold more than its pieces.
    is_part: bool = False  # True if another run may repeat this one and continue it.


def trace_id(kind: str, own_id: str, content: object) -> str:
    """Return the id of a run's trace: the ``kind`` of its source, and the run's own id, escaped as in a URL.

    A digest of the content replaces an own id that is missing or too long.
    """
    if own_id and is_trace_id(full := f"{TRACE_ID_PREFIX}{kind}:{quote(own_id, _PRINTABLE, errors='replace')}"):
        return full
    digest = hashlib.blake2b(as_json(content).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{TRACE_ID_PREFIX}{kind}:{digest}"


def run_of_session(kind: str, own_id: str, lines: Sequence[Node], pieces: Sequence[Piece]) -> Run:
    """Make a run of the lines of a session, which an agent of this kind wrote."""
    run_id = trace_id(kind, own_id, [line.value for line in lines])
    return Run(lines[0], run_id, pieces, first_timestamp(lines), framework=kind)


def digests_of(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Yield for each piece the 16-byte digest of all pieces up to it, without the ids of calls and the names of results."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        content = as_json([piece.kind, piece.text.strip(), piece.name * (piece.kind == "call"), parsed(piece.arguments)])
        digest.update(content.encode("utf-8", "surrogatepass"))
        yield digest.digest()


def trace_of(run: Run, supplied: SuppliedFields, limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """Make a trace, as JSON, that passes :func:`~kp_scorer.decoding.decode_trace`; return it with its marks, which are counted.

    The marks are the names of the fields that were assumed, ``rated`` if the success is a number over 1, and ``mended`` if the
    trace had to be cut or mended.

    The objective is the first message of the user. The result is the last message of the agent, or else the last result of a
    tool. Raises NotConverted if there is no objective, no step or no result; if neither the source nor the caller supplies a
    field; or if the trace is over a limit.
    """
    objective = next((piece for piece in run.pieces if piece.kind == "user"), None)
    if objective is None:
        raise run.node.refusal("expected a message of the user: the first one is the objective")
    pieces = [piece for piece in run.pieces if piece is not objective]
    if not pieces:
        raise run.node.refusal("expected messages or calls of the agent: they are the steps")
    answer, result = _result(run, pieces)
    fields, marks = _fields_of(run, supplied)
    metadata = {name: fields[name] for name in ("created_at", "task_domain", "success")}
    metadata |= {"visibility": supplied.visibility, "privacy_level": supplied.privacy_level}
    metadata |= {name: fields[name] for name in ("framework", "source_id") if fields[name]}
    trace = {
        "@context": "https://openknowledgepulse.org/schema/v1",
        "@type": "ReasoningTrace",
        "id": fields["id"],
        "metadata": metadata,
        "task": {"objective": objective.text},
        "steps": _steps(pieces),
        "outcome": {"result_summary": result, "confidence": fields["confidence"]},
    }
    try:
        decode_trace(trace, limits)
        return trace, marks
    except InvalidTrace:
        trace = _fitted(trace, limits)
    try:
        decode_trace(trace, limits)
    except InvalidTrace as error:
        places = {"task": objective.node, "outcome": answer} | {f"steps.{n}": piece.node for n, piece in enumerate(pieces)}
        raise _in_the_source(run.node, error, places) from None
    return trace, [*marks, "mended"]


def _fields_of(run: Run, supplied: SuppliedFields) -> tuple[dict[str, Any], list[str]]:
    """Return the id and the metadata, and the marks of the trace, such as the names of assumed fields.

    A field comes from the caller's path, else from the source, else from the caller, else from the caller's defaults.
    """
    assumed = []
    record = run.node.value if run.record is None else run.record
    fields: dict[str, Any] = {"id": run.trace_id}
    fields |= {"success": run.success, "created_at": run.created_at, "framework": run.framework}
    for name, path in supplied.paths.items():
        if (value := field_at(record, path)) is not None:
            fields[name] = _field(name, value, run, run.node._replace(path=path))
            assumed += ["rated"] if name == "success" and not isinstance(value, str) and value > 1 else []
    source_id = next((value for key in _OWN_IDS if isinstance(value := field_at(record, key), str) and value), None)
    is_in_id = source_id and quote(source_id, _PRINTABLE, errors="replace") in fields["id"]
    fields["source_id"] = None if is_in_id else source_id
    defaults = supplied.defaults or {}
    for name in _OPTIONS:
        if fields.get(name) is None:
            fields[name] = getattr(supplied, name)
        if fields[name] is None and name in defaults:
            fields[name] = defaults[name](run.node.line)
            assumed += [name] if fields[name] is not None else []
    if missing := dict(field_and_option for name, field_and_option in _OPTIONS.items() if fields[name] is None):
        raise FieldsMissing(run.node.line, missing)
    return fields, assumed


def _field(name: str, value: object, run: Run, place: Node) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    match name, value:
        case "id", str() | int():
            return trace_id(run.trace_id.split(":")[2], str(value), value)
        case "success", bool():
            return value
        case "success", int() | float() if is_number:
            return value >= _LEAST_SUCCESSFUL_NUMBER
        case "success", str() if value.lower() in _SUCCESSES + _FAILURES:
            return value.lower() in _SUCCESSES
        case "created_at", int() | float() | str() if time := time_of(place._replace(value=value)):
            return time
        case "confidence", int() | float() if is_number and 0 <= value <= 1:
            return value
        case "task_domain", str() if value:
            return value
    raise place.refusal(f"expected {_EXPECTED[name]}")


def _result(run: Run, pieces: Sequence[Piece]) -> tuple[Node, str]:
    if run.answer and run.answer.text().strip():
        return run.answer, run.answer.text()
    last = next((piece for piece in reversed(pieces) if piece.kind != "result"), None)
    if last and last.kind == "call" and ends_run(last):
        arguments = call_input(last) or {}
        if text := next((text for key in _ANSWERS if isinstance(text := arguments.get(key), str) and text.strip()), ""):
            return last.node, text
    for kind in ("agent", "result"):
        for piece in reversed(pieces):
            if piece.kind == kind:
                return piece.node, piece.text
    refusal = run.node.refusal("expected a message of the agent, or a result of a tool: the last one is the result")
    error = Unfinished(refusal.line, refusal.problems)
    error.is_part = run.is_part
    raise error


def ends_run(call: Piece) -> bool:
    """Return whether a call is one by which agents end their run, such as ``finish``."""
    return "".join(filter(str.isalpha, call.name)).lower() in _LAST_CALLS


def _steps(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    # A turn is everything that the agent does up to the next result or message of the user. Its first step is a recovery if one
    # of the results just before it is an error and the turn calls a tool: without a call, the agent tries nothing again.
    steps: list[dict[str, Any]] = []
    after_error = False
    for is_turn, group in groupby(pieces, key=lambda piece: piece.kind in ("agent", "call")):
        turn = list(group)
        after_error, is_recovery = any(piece.kind == "result" and is_error(piece) for piece in turn), after_error
        start = len(steps)
        steps += ({"step_id": number} | _step(piece) for number, piece in enumerate(turn, start))
        if is_turn and is_recovery and has_kind(turn, "call"):
            steps[start]["type"] = "error_recovery"
    return steps


def _step(piece: Piece) -> dict[str, Any]:
    if piece.kind != "call":
        return {"type": "thought" if piece.kind == "agent" else "observation", "content": piece.text}
    step = {"type": "tool_call", "content": call_text(piece), "tool": {"name": piece.name}}
    optional = {"input": call_input(piece), "latency_ms": piece.latency_ms}
    return step | {key: value for key, value in optional.items() if value is not None}


def _fitted(trace: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Return a trace without lone surrogates and numbers that JSON lacks, cut to the limits as far as possible.

    The arguments of a call are also in its content, so that is cut first. Then all texts are cut, shorter and shorter.
    """
    chars = limits.field_chars
    trace = _mended(trace, chars)
    if _size_of(trace) > limits.message_bytes:
        steps = [
            step | {"content": _cut(step["content"], _LEAST_CHARS)} if step.get("input") else step for step in trace["steps"]
        ]
        trace = trace | {"steps": steps}
    while _size_of(trace) > limits.message_bytes and chars > _LEAST_CHARS:
        chars //= 2
        trace = _mended(trace, chars)
    return trace


def _size_of(trace: dict[str, Any]) -> int:
    return len(json.dumps(trace, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))


def _mended(value: Any, most_chars: int) -> Any:
    if isinstance(value, str):
        return _cut(without_halves(value), most_chars)
    if isinstance(value, dict):
        return {without_halves(key): _mended(inner, most_chars) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mended(inner, most_chars) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut(text: str, most_chars: int) -> str:
    """Cut a text to ``most_chars`` characters; a cut text ends with a note of its original length."""
    note = f" [cut: {len(text)} characters]"
    return text if len(text) <= most_chars else text[: max(0, most_chars - len(note))] + note


def _in_the_source(origin: Node, error: InvalidTrace, places: dict[str, Node]) -> NotConverted:
    """Return an error that names a place in the source, because the user does not see the trace."""
    field, expected = error.problems[0]
    parts = field.split(".")
    node = places.get(".".join(parts[:2])) or places.get(parts[0])
    if expected.startswith("expected at most"):
        expected += " (a larger `queues.message_bytes` raises this limit)"
    return (node or origin).refusal(expected if node or field == "$" else f"{field}: {expected}")
