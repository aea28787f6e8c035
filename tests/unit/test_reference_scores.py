"""The reference's own scores, where the real traces can be read."""

import json
from typing import Any, Final

import pytest
from kp_scorer.decoding import decode_trace
from kp_scorer.scoring import Policy, novelty_of, score
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import LIMITS, decode_json
from tests.support.paths import REFERENCE_TRACES

POLICY: Final = Policy()
UNKNOWN: Final = novelty_of(None)

pytestmark = pytest.mark.skipif(not REFERENCE_TRACES.is_dir(), reason=f"there are no real traces in {REFERENCE_TRACES}")


def lines(name: str) -> list[bytes]:
    return (REFERENCE_TRACES / name).read_bytes().splitlines()


def cases() -> list[Any]:
    """The conformance cases; none where they cannot be read, which then is a test's failure and no error of collection."""
    path = REFERENCE_TRACES / "conformance.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
    return [pytest.param(row["trace"], row["score"], id=row["case"]) for row in rows]


@pytest.fixture(scope="module")
def real_traces() -> list[ReasoningTrace]:
    return [decode_json(line, LIMITS) for line in lines("traces.jsonl")]


@pytest.mark.parametrize("name", ["conformance.jsonl", "expected.jsonl", "traces.jsonl"])
def test_every_file_of_the_reference_is_there(name: str) -> None:
    assert lines(name)


@pytest.mark.parametrize(("trace", "expected"), cases())
def test_conformance_case_scores_as_in_the_reference(trace: object, expected: float) -> None:
    scored = score(decode_trace(trace, LIMITS), UNKNOWN, POLICY)
    assert scored.score == pytest.approx(expected, abs=1e-9)


def test_every_real_trace_decodes_under_an_id_of_its_own(real_traces: list[ReasoningTrace]) -> None:
    assert len({trace.id for trace in real_traces}) == len(lines("traces.jsonl"))


def test_every_real_trace_scores_as_in_the_reference_without_embedder(real_traces: list[ReasoningTrace]) -> None:
    rows = [json.loads(line) for line in lines("expected.jsonl")]
    assert [trace.id for trace in real_traces] == [row["id"] for row in rows]
    differing = {
        row["id"]: (scored.score, row["score_without_embedder"])
        for trace, row in zip(real_traces, rows, strict=True)
        if (scored := score(trace, UNKNOWN, POLICY)).score != pytest.approx(row["score_without_embedder"], abs=1e-9)
    }
    assert differing == {}


def test_real_traces_exercise_every_override_and_more_than_one_profile(real_traces: list[ReasoningTrace]) -> None:
    scored = [score(trace, UNKNOWN, POLICY) for trace in real_traces]
    assert len({item.profile for item in scored}) > 1
    assert {override.name for item in scored for override in item.overrides} >= {"recovered_from_errors", "single_tool"}
