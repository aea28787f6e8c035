"""Decisions made of nothing but what a test says of them."""

from typing import Any

from hypothesis import strategies as st
from kp_scorer.decision import Decision, Dimensions, FiredOverride, Nearest, Novelty, Override, Timings
from kp_scorer.scoring import PROFILES
from kp_scorer.scoring.policy import Bounds

from tests.support.builders import BUILT_IN_DOMAINS

MIDDLING = Dimensions(complexity=0.6, novelty=0.4, tool_diversity=0.5, outcome_confidence=0.8)


def decision(
    trace_id: str = "kp:trace:0",
    *,
    score: float = 0.5,
    threshold: float = 0.75,
    review: float | None = None,
    domain: str = "code",
    novelty: float = 0.4,
    nearest: tuple[str, float] | None = None,
    duplicate_of: str | None = None,
    overrides: tuple[Override, ...] = (),
    **fields: Any,
) -> Decision:
    """A decision with this score, whatever its dimensions would give."""
    whole: dict[str, Any] = {
        "trace_id": trace_id,
        "domain": domain,
        "outcome": Bounds(threshold, "default", review).outcome(score),
        "score": score,
        "threshold": threshold,
        "threshold_source": "default",
        "review": review,
        "dimensions": MIDDLING.model_copy(update={"novelty": novelty}),
        "profile": "default",
        "weights": PROFILES["default"],
        "composite": score,
        "overrides": tuple(FiredOverride(name=name, score=score) for name in overrides),
        "novelty": Novelty(
            source="embedding",
            nearest=Nearest(trace_id=nearest[0], similarity=nearest[1]) if nearest else None,
            duplicate_of=duplicate_of,
        ),
        "timings": Timings(look_up_ms=0.1, embed_ms=20.0, place_ms=1.5, batch_size=1),
        "decided_at": "2026-01-01T00:00:00.000+00:00",
    }
    return Decision(**whole | fields)


def decisions(least: int = 1) -> st.SearchStrategy[list[Decision]]:
    """Decisions on traces of all kinds of domains, which may repeat each other and traces that are not among them."""
    ids = st.integers(0, 30).map("kp:trace:{}".format)
    one = st.builds(
        decision,
        ids,
        score=st.floats(0, 1),
        threshold=st.sampled_from([0.5, 0.75]),
        review=st.sampled_from([None, 0.25]),
        domain=st.sampled_from(BUILT_IN_DOMAINS) | st.text(max_size=3),
        novelty=st.floats(0, 1),
        nearest=st.none() | st.tuples(ids, st.floats(0.9, 1)),
        duplicate_of=st.none() | ids,
    )
    return st.lists(one, min_size=least, max_size=40, unique_by=lambda each: each.trace_id)
