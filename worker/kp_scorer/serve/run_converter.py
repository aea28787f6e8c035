"""Turns the spans of a run into its trace, in a process of its own, which alone parses what agents wrote."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from kp_scorer.adapters import Converter, SuppliedFields
from kp_scorer.bounded import Answers
from kp_scorer.decoding import Limits, check_values
from kp_scorer.errors import InvalidTrace, NotConverted, Problem

SERVICE: Final = "service.name"
SUPPLIED: Final = ("confidence", "domain", "privacy_level", "success", "visibility")
"""The fields that no convention of spans has. Attributes with the prefix ``kp.`` carry them, on a root span or its resource."""
_DEFAULTS: Final = {"domain": "default", "privacy_level": "private", "visibility": "private"}

_FIELDS: Final = TypeAdapter(SuppliedFields)
_MISSING: Final = "expected this attribute on the root span or its resource, or the setting of its name in the section serve"
_LACKS: Final = {"outcome.confidence": Problem("kp.confidence", _MISSING), "metadata.success": Problem("kp.success", _MISSING)}


def load(arguments: Sequence[str]) -> tuple[None, Answers]:
    """Return a function that converts exports, with these fields for runs that lack them, and these limits."""
    supplied, limits, most_values = arguments
    return None, partial(_converted, _DEFAULTS | json.loads(supplied), Limits.model_validate_json(limits), int(most_values))


def _converted(supplied: dict[str, Any], limits: Limits, most_values: int, raw: bytes) -> dict[str, Any]:
    """Return the trace of an export, or the problems that prevent one."""
    try:
        check_values(raw, most_values)
        export = json.loads(raw)
        attributes = _attributes(export["resourceSpans"][0]["scopeSpans"][0]["spans"])
        fields = _fields({name: attributes.get(f"kp.{name}", supplied[name]) for name in SUPPLIED})
        converter = Converter(fields, limits, "otel")
        (converted,) = [*converter.feed(1, export), *converter.end()]
        if isinstance(converted, NotConverted):
            raise converted
    except (InvalidTrace, NotConverted) as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return {"problems": [_LACKS.get(each.field, each) for each in error.problems]}
    trace, service = converted.trace, attributes.get(SERVICE)
    # OpenTelemetry names a service like this if nobody has named it.
    if isinstance(service, str) and not service.startswith("unknown_service"):
        trace["metadata"]["agent_id"] = service
    return {"trace": trace}


def _attributes(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the attributes of a run: the root's win over those of other spans, and a span's over its resource's."""
    root_last = sorted(spans, key=lambda span: not span.get("parentSpanId"))
    pairs = (pair for span in root_last for pair in span["attributes"] if isinstance(pair, dict))
    values = {str(pair.get("key")): pair.get("value") for pair in pairs}
    return {key: next(iter(value.values()), None) for key, value in values.items() if isinstance(value, dict)}


def _fields(values: dict[str, Any]) -> SuppliedFields:
    try:
        # Attributes may be texts, as OTEL_RESOURCE_ATTRIBUTES has no other type.
        return _FIELDS.validate_python({"task_domain": values.pop("domain"), "paths": {}, **values})
    except ValidationError as error:
        names = {str(item["loc"][0]).removeprefix("task_"): item["msg"] for item in error.errors(include_input=False)}
        raise InvalidTrace([Problem(f"kp.{name}", message) for name, message in names.items()]) from None
