"""A revision equals the decision that the trace would have got if its late outcome had been known from the start."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decision import Decision
from kp_scorer.decoding import check_late_outcome
from kp_scorer.errors import InvalidTrace
from kp_scorer.gate import GatePolicy
from kp_scorer.limits import Limits
from kp_scorer.scoring import Policy, revise
from kp_scorer.trace import LateOutcome, ReasoningTrace, outcome_key

from tests.support.builders import changed, decided, policies, traces

CONFIDENCES = st.none() | st.floats(0, 1)
ADMITS = GatePolicy(0.1).admits


def late_outcome(**fields: object) -> LateOutcome:
    payload = {"@type": "LateOutcome", "id": "kp:outcome:1", "trace_id": "kp:trace:1", "success": True, "key": "k" * 16}
    return check_late_outcome(payload | fields, Limits())


@given(traces(), policies(max_confidence=st.sampled_from([1.0, 0.5])), st.booleans(), CONFIDENCES, st.booleans())
def test_a_revision_scores_as_if_the_outcome_had_been_known(
    trace: ReasoningTrace, policy: Policy, success: bool, confidence: float | None, is_second: bool
) -> None:
    first = decided(trace, policy)
    earlier = revise(first, late_outcome(success=not success, confidence=0.3), ADMITS) if is_second else first
    # The stored decision is all that a revision needs: settings that have changed since do not matter.
    stored = Decision.model_validate_json(earlier.model_dump_json())
    revision = revise(stored, late_outcome(success=success, confidence=confidence), ADMITS)
    payload = changed(trace.model_dump(mode="json"), "metadata.success", success)
    payload["outcome"]["confidence"] = trace.outcome.confidence if confidence is None else confidence
    expected = decided(ReasoningTrace.model_validate(payload), policy)
    own = {"revision", "supersedes", "revised_by", "stated", "timings", "decided_at", "received"}
    assert revision.model_dump(exclude=own) == expected.model_dump(exclude=own)
    assert (revision.revision, revision.stated) == (earlier.revision + 1, first.stated)
    assert revision.supersedes
    assert (revision.supersedes.outcome, revision.supersedes.score) == (earlier.outcome, earlier.score)


def test_a_key_speaks_for_one_trace_only() -> None:
    own = f"kp:trace:shop:{hashlib.sha256(b'a-secret-of-the-shop').hexdigest()}"
    assert late_outcome(trace_id=own, key="a-secret-of-the-shop").is_authentic("ledger's")
    assert not late_outcome(trace_id="kp:trace:1", key="a-secret-of-the-shop").is_authentic("ledger's")
    assert late_outcome(key=outcome_key("ledger's", "kp:trace:1")).is_authentic("ledger's")
    assert not late_outcome(key=outcome_key("ledger's", "kp:trace:2")).is_authentic("ledger's")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("id", each) for each in ("kp:trace:1", "kp:outcome:", "kp:outcome:a b")),
        ("trace_id", "kp:outcome:1"),
        *(("success", each) for each in ("false", None, 1)),
        *(("confidence", each) for each in (1.1, "1", float("nan"))),
        *(("reason", each) for each in ("x" * 201, "\ud800")),
        *(("key", each) for each in ("short", "ü" * 16)),
    ],
)
def test_an_invalid_late_outcome_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(InvalidTrace) as refused:
        late_outcome(**{field: value})
    assert [problem.field for problem in refused.value.problems] == [field]
