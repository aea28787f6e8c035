"""Converts the spans of a run to its trace, in a separate process, the only one that parses the texts of agents."""

import json
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from kp_scorer.adapters import Converter, SuppliedFields
from kp_scorer.adapters.attributes import SERVICE, attributes_of_run
from kp_scorer.adapters.building import digests_of
from kp_scorer.adapters.pieces import Piece
from kp_scorer.bounded import Answers
from kp_scorer.characters import without_halves
from kp_scorer.errors import InvalidTrace, NotConverted, NotRecorded, Problem, Unfinished
from kp_scorer.limits import Limits, check_values

SUPPLIED: Final = ("confidence", "domain", "privacy_level", "success", "visibility")
"""The fields for which spans have no convention.

Attributes with the prefix ``kp.`` carry them, on a root span or its resource.
"""
_DEFAULTS: Final = {"domain": "default", "privacy_level": "private", "visibility": "private"}

_ASSUMED: Final = {"confidence": 0.5, "success": True}
"""The confidence of a run that states none, and the success of one without an error."""

_FIELDS: Final = TypeAdapter(SuppliedFields)


def load(arguments: Sequence[str]) -> tuple[None, Answers]:
    """Return no greeting, and a function that converts exports.

    The ``arguments`` are the fields for runs that lack them and the limits, both as JSON, and the most values in an export.
    """
    supplied, limits, most_values = arguments
    return None, partial(_converted, _DEFAULTS | json.loads(supplied), Limits.model_validate_json(limits), int(most_values))


def _converted(supplied: dict[str, Any], limits: Limits, most_values: int, raw: bytes) -> dict[str, Any]:
    """Return a dict with the ``trace`` of an export, with its ``problems``, or with the reason why it is ``left_out``.

    ``is_open`` is true if spans of the run seem to be missing.
    """
    try:
        check_values(raw, most_values)
        export = json.loads(raw)
        spans = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
        attributes = attributes_of_run(spans)
        values = {name: attributes.get(f"kp.{name}", supplied[name]) for name in SUPPLIED}
        unstated = [name for name in _ASSUMED if values[name] is None]
        converter = Converter(_fields(values | {name: _ASSUMED[name] for name in unstated}), limits, "otel")
        results = [*converter.feed(1, export), *converter.end()]
        if not results:
            return {"left_out": "no_agent", "is_open": len(spans) == 1 or _is_open(spans, is_answered=False)}
        (converted,) = results
        if isinstance(converted, NotConverted):
            raise converted
    except NotRecorded as error:
        return {"left_out": "no_content", "detail": error.problems[0].expected, "is_open": True}
    except Unfinished as error:
        # Leave out a single call of a model, and a run that waits for a person: another run repeats them as its beginning.
        is_alone = error.is_part or (len(spans) == 1 and not spans[0].get("parentSpanId"))
        return {"left_out": "unfinished"} if is_alone else {"problems": error.problems, "is_open": True}
    except (InvalidTrace, NotConverted) as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return {"problems": error.problems}
    if converted.run.is_part and converted.run.pieces[-1].kind == "call":
        return {"left_out": "unfinished"}
    trace = converted.trace
    named = attributes.get(SERVICE)
    service = without_halves(named) if isinstance(named, str) else ""
    # OpenTelemetry gives this name to services that nobody has named.
    if service and not service.startswith("unknown_service"):
        trace["metadata"]["agent_id"] = service
    assumed = [name for name in unstated if name != "success" or converted.run.success is None]
    trace["metadata"] |= {"assumed": assumed} if assumed else {}
    recording = _recording(spans, converted.run.pieces, service)
    ids = {span.get("spanId") for span in spans}
    roots = (str(span.get("spanId")).lower() for span in spans if "body" not in span and span.get("parentSpanId") not in ids)
    return {
        "trace": trace,
        "agent_span": next(roots, ""),
        "recording": recording,
        "is_open": _is_open(spans, is_answered=trace["steps"][-1]["type"] == "thought"),
    }


def _recording(spans: Sequence[dict[str, Any]], pieces: Sequence[Piece], service: str) -> list[Any]:
    """Return the fields of a :class:`~kp_scorer.store.runs.Recording`."""
    *_, content = digests_of(pieces)
    digest = blake2b(content, key=service.encode()[:64], digest_size=16).hexdigest()
    scopes = sorted({str(span.get("scope", {}).get("name")) for span in spans})
    times_ns = [
        _nanoseconds(span.get(key)) for span in spans for key in ("startTimeUnixNano", "endTimeUnixNano") if key in span
    ]
    return [digest, " ".join(scopes), min(times_ns), max(times_ns)]


def _is_open(spans: Sequence[dict[str, Any]], *, is_answered: bool) -> bool:
    """Return whether a run lacks spans: a parent of others, or the span with the answer, unless the root ended last."""
    spans = [span for span in spans if "body" not in span]
    ids, parents = {str(span.get("spanId")) for span in spans}, {str(span.get("parentSpanId") or "") for span in spans}
    ends_ns = [(_nanoseconds(span.get("endTimeUnixNano")), not span.get("parentSpanId")) for span in spans]
    if "" in parents and not parents <= ids | {""}:
        return True
    return not (is_answered or max(ends_ns, default=(0, False))[1])


def _nanoseconds(value: object) -> int:
    return int(text) if (text := str(value))[:20].isdecimal() and len(text) <= 20 else 0


def _fields(values: dict[str, Any]) -> SuppliedFields:
    try:
        # Accept texts for numbers and booleans, because attributes from OTEL_RESOURCE_ATTRIBUTES are always texts.
        return _FIELDS.validate_python({"task_domain": values.pop("domain"), "paths": {}, **values})
    except ValidationError as error:
        names = {str(item["loc"][0]).removeprefix("task_"): item["msg"] for item in error.errors(include_input=False)}
        raise InvalidTrace([Problem(f"kp.{name}", message) for name, message in names.items()]) from None
