"""Decisions of other versions: those that are kept since before an upgrade, and those of who has been upgraded first."""

import json
from typing import Any, Final

import pytest
from kp_scorer.decision import Decision
from pydantic import ValidationError

BY_0_1_0: Final = """
{"schema_version":1,"trace_id":"kp:trace:full","domain":"law","taken_for":"legal","outcome":"review","score":0.61,"threshold":0.72,
"threshold_source":"submission","review":0.53,
"dimensions":{"complexity":0.11,"novelty":0.12,"tool_diversity":0.13,"outcome_confidence":0.14},"profile":"justice",
"weights":{"complexity":0.21,"novelty":0.22,"tool_diversity":0.23,"outcome_confidence":0.34},"composite":0.62,
"overrides":[{"name":"recovered_from_errors","score":0.61},{"name":"single_tool","score":0.61}],
"novelty":{"source":"embedding","nearest":{"trace_id":"kp:trace:near","similarity":0.88},"duplicate_of":"kp:trace:first",
"embedder":"MiniLM","space":"0123456789abcdef","entry":"1767225600000-7"},
"timings":{"look_up_ms":1.5,"embed_ms":2.5,"place_ms":3.5,"batch_size":9},"decided_at":"2026-03-04T05:06:07.890+02:00"}
"""
"""A decision with everything in it, as version 0.1.0 has written it to ledgers and queues."""


def later(value: Any) -> Any:
    """The same JSON, with a field that nobody knows yet in every object."""
    if isinstance(value, dict):
        return {"later": {"deep": [1]}} | {name: later(part) for name, part in value.items()}
    return [later(part) for part in value] if isinstance(value, list) else value


def test_decision_of_the_first_version_is_read_with_all_that_it_says() -> None:
    read = Decision.model_validate_json(BY_0_1_0).model_dump(mode="json")
    known = json.loads(BY_0_1_0)
    assert {name: read[name] for name in known} == known


def test_fields_that_a_later_version_adds_are_ignored_wherever_they_are() -> None:
    assert Decision.model_validate(later(json.loads(BY_0_1_0))) == Decision.model_validate_json(BY_0_1_0)


def test_decision_of_another_schema_is_refused_and_not_misread() -> None:
    with pytest.raises(ValidationError, match="schema_version"):
        Decision.model_validate(json.loads(BY_0_1_0) | {"schema_version": 2})
