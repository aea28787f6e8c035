"""What ``import kp_scorer`` gives, and what it costs."""

import json
import subprocess
import sys
from typing import Any, Final

import kp_scorer
import pytest
from kp_scorer import Decision, InvalidTrace, ReasoningTrace, TraceConflict, score_traces
from kp_scorer.settings import Settings, load_settings

from tests.support.builders import LIMITS, minimal_payload
from tests.support.traces import sample_traces

HEAVY: Final = {"celery", "kombu", "redis", "openvino", "torch", "transformers", "numpy"}
WITHOUT_EMBEDDER: Final[Settings] = load_settings({"embedding.embedder": "none"})


def imported_by(code: str) -> set[str]:
    """The modules that a fresh interpreter holds after it ran ``code``."""
    told = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(told.stdout))


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not imported_by("import kp_scorer") & HEAVY


def test_traces_errors_and_rows_import_nothing_heavy() -> None:
    assert not imported_by("from kp_scorer import InvalidTrace, ReasoningTrace, ServiceUnavailable, TraceDead, rows") & HEAVY


@pytest.mark.parametrize("name", kp_scorer.__all__)
def test_every_name_of_the_face_is_there(name: str) -> None:
    found = getattr(kp_scorer, name)
    assert found.__name__ == name
    assert found.__module__.startswith("kp_scorer.")


def test_dir_shows_the_face_and_nothing_else() -> None:
    assert dir(kp_scorer) == sorted(kp_scorer.__all__)


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = kp_scorer.nothing_of_this_name


def test_samples_are_scored_in_their_order() -> None:
    payloads = sample_traces()
    decisions = list(score_traces(payloads, WITHOUT_EMBEDDER))
    assert [decision.trace_id for decision in decisions] == [payload["id"] for payload in payloads]
    assert all(isinstance(decision, Decision) for decision in decisions)
    assert {decision.novelty.source for decision in decisions} == {"no_embedder"}


def test_traces_and_what_their_json_says_are_scored_alike() -> None:
    payloads = sample_traces()[:5]
    traces = [ReasoningTrace.model_validate(payload) for payload in payloads]
    assert scores(traces) == scores(payloads)


def test_decisions_are_yielded_as_soon_as_they_are_made() -> None:
    decisions = score_traces([minimal_payload(), {}], WITHOUT_EMBEDDER)
    assert next(decisions).trace_id == "kp:trace:minimal"
    with pytest.raises(InvalidTrace):
        next(decisions)


def test_what_is_no_trace_is_refused_and_names_the_field() -> None:
    with pytest.raises(InvalidTrace, match=r"outcome\.confidence"):
        scores([minimal_payload(confidence=2.0)])


def test_what_is_over_a_limit_is_refused() -> None:
    with pytest.raises(InvalidTrace, match=r"task\.objective"):
        scores([minimal_payload(objective="x" * (LIMITS.field_chars + 1))])


def test_an_id_that_comes_again_with_something_else_to_say_is_a_conflict() -> None:
    with pytest.raises(TraceConflict, match="kp:trace:minimal"):
        scores([minimal_payload(), minimal_payload(objective="count the closed invoices")])


def test_a_trace_that_comes_again_keeps_its_decision() -> None:
    first, again = score_traces([minimal_payload(), minimal_payload()], WITHOUT_EMBEDDER)
    assert again == first


def scores(traces: list[Any]) -> list[float]:
    return [decision.score for decision in score_traces(traces, WITHOUT_EMBEDDER)]
