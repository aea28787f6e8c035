"""Scoring in process with the real model."""

import pytest
from kp_scorer import score_traces
from kp_scorer.settings import load_settings

from tests.support.traces import fresh_samples


def test_batches_get_the_scores_that_traces_get_one_by_one() -> None:
    traces = fresh_samples(40)
    together, alone = (
        list(score_traces(traces, load_settings({"worker.batch_size": size, "embedding.required": True}))) for size in (32, 1)
    )
    assert [decision.timings.batch_size for decision in together] == [32] * 32 + [8] * 8
    assert [decision.trace_id for decision in together] == [trace["id"] for trace in traces]
    for one, other in zip(together, alone, strict=True):
        # In half precision sums depend on what else is in the batch.
        assert one.score == pytest.approx(other.score, abs=0.001)
        assert one.outcome == other.outcome
