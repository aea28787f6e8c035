"""Pinned sets: the entry of each that is nearest to a trace, and the outcome that it demands."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision, Outcome
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.novelty import MemoryLog, Window
from kp_scorer.novelty import pins as pins_module
from kp_scorer.novelty.pins import PinnedSearch, PinnedSet, Pins, audit_pinned
from kp_scorer.scoring import Policy, decide_again
from numpy.typing import NDArray

from tests.support.builders import make_trace, step
from tests.support.word_embedder import WordEmbedder, decide_one, word_decider

WINDOW = Window(max_elements=10, ttl_ms=60_000, slack_elements=10, slack_ms=60_000)
NOTED: Final = {"tasks": (0.9, None), "runs": (0.9, None)}
REJECTING: Final = {"tasks": (0.9, "rejected")}


class Shelf(dict[str, PinnedSet]):
    """Pinned sets in memory."""

    def versions(self, names: Sequence[str]) -> list[str | None]:
        return [self[name].version if name in self else None for name in names]

    def read(self, name: str) -> PinnedSet | None:
        return self.get(name)


def texts(*texts: str, kind: Literal["traces", "texts"] = "texts") -> PinnedSet:
    return PinnedSet(kind, [str(number) for number, _ in enumerate(texts, 1)], WordEmbedder().embed(texts))


def decider_with(shelf: Shelf, *, threshold: float = 0.0, limits: Any, **options: Any) -> Decider:
    """Return a decider with these sets; ``limits`` has the similarity of each, and the outcome of traces that exceed it."""
    pins = Pins(shelf, limits, WordEmbedder.dimensions)
    pins.load()
    return word_decider(Policy(threshold=threshold), window=WINDOW, pins=pins, **options)


def decide(decider: Decider, objective: str, content: str = "seven other words that nobody has ever pinned") -> Decision:
    trace_id = f"kp:trace:{abs(hash((objective, content)))}"
    return decide_one(decider, make_trace(trace_id=trace_id, objective=objective, steps=[step("thought", content=content)]))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_nearest_is_what_comparing_one_by_one_gives(entries: int, traces: int, rows_at_once: int, head: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    # Vectors with only two different values lead to ties.
    vectors = chance.choice([-0.5, 0.5], (entries, 4)).astype(np.float32)
    asked = chance.choice([-0.5, 0.5], (traces, 4)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pins_module, "_ROWS", rows_at_once)
        patch.setattr(pins_module, "_AT_ONCE", rows_at_once)
        patch.setattr(pins_module, "_HEAD", head)
        nearest = PinnedSearch(PinnedSet("texts", [str(row) for row in range(entries)], vectors)).nearest(asked)
    for vector, (entry, similarity) in zip(asked, nearest, strict=True):
        similarities = [float(vector @ row) for row in vectors]
        assert (int(entry), similarity) == (similarities.index(max(similarities)), max(similarities))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.01, 0.3, 10.0]), st.booleans())
def test_nearest_is_exact_whether_entries_are_alike_or_not(seed: int, spread: float, near: bool) -> None:
    chance = np.random.default_rng(seed)
    vectors = unit(chance.standard_normal((5, 16))[chance.integers(5, size=300)] + spread * chance.standard_normal((300, 16)))
    asked = unit(vectors[:20] + 0.1 * chance.standard_normal((20, 16)) if near else chance.standard_normal((20, 16)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pins_module, "_HEAD", 4)
        nearest = PinnedSearch(PinnedSet("traces", [str(row) for row in range(300)], vectors)).nearest(asked)
    assert [similarity for _, similarity in nearest] == pytest.approx((asked @ vectors.T).max(axis=1), abs=1e-6)
    assert [asked[place] @ vectors[int(row)] for place, (row, _) in enumerate(nearest)] == pytest.approx(
        [similarity for _, similarity in nearest], abs=1e-6
    )


def unit(vectors: NDArray[np.float64]) -> NDArray[np.float32]:
    lengths: NDArray[np.float64] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / lengths).astype(np.float32)


def test_texts_are_compared_with_the_objective_and_traces_with_all_of_a_trace() -> None:
    runs = texts("book a flight then paid by card", kind="traces")._replace(ids=["kp:trace:pinned"])
    shelf = Shelf(tasks=texts("wash the car", "book a flight"), runs=runs)
    decision = decide(decider_with(shelf, limits=NOTED), "book a flight", "then paid by card")
    assert [(each.name, each.nearest, each.similarity) for each in decision.pinned] == [
        ("tasks", "2", 1.0),
        ("runs", "kp:trace:pinned", 1.0),
    ]
    assert decision.outcome == "accepted", "they are only noted"
    assert decision.dimensions.novelty == 0.5, "they have no place in the window"


@pytest.mark.parametrize(
    ("outcome", "limit", "threshold", "expected"),
    [
        ("rejected", 0.9, 0.0, "rejected"),
        ("review", 0.9, 0.0, "review"),
        ("review", 0.9, 1.0, "rejected"),
        ("rejected", 1.0, 0.0, "accepted"),
        (None, 0.9, 0.0, "accepted"),
    ],
)
@pytest.mark.parametrize("names_nearest", [True, False])
def test_a_set_demands_an_outcome_beyond_its_similarity(
    outcome: Outcome | None, limit: float, threshold: float, expected: Outcome, names_nearest: bool
) -> None:
    shelf, limits = Shelf(tasks=texts("book a flight")), {"tasks": (limit, outcome)}
    decision = decide(decider_with(shelf, threshold=threshold, limits=limits, names_nearest=names_nearest), "book a flight")
    assert decision.outcome == expected
    (pinned,) = decision.pinned
    demanded = outcome if limit < 1 else None
    assert (pinned.nearest, pinned.similarity, pinned.outcome) == ("1" if names_nearest else None, 1.0, demanded)
    assert decide_again(decision, Policy(threshold=0.0)).outcome == (demanded or "accepted")


def test_traces_are_embedded_again_after_texts_replace_pinned_traces() -> None:
    shelf = Shelf(tasks=texts("wash the car", kind="traces"))
    decider = decider_with(shelf, limits=REJECTING)
    trace = make_trace(objective="book a flight")
    embedded = decider.acquire([trace])
    decider.embed(embedded)
    shelf["tasks"] = texts("book a flight")
    with pytest.raises(ServiceUnavailable, match="meanwhile"):
        decider.finish(embedded)
    assert decide_one(decider, trace).outcome == "rejected"


def test_a_set_of_other_vectors_is_refused() -> None:
    with pytest.raises(ServiceUnavailable, match=r"novelty\.pinned: tasks"):
        decider_with(Shelf(tasks=PinnedSet("texts", ["1"], np.ones((1, 3), np.float32))), limits=REJECTING)


def test_a_version_stands_for_the_whole_set() -> None:
    first = texts("wash the car", "book a flight")
    others = [first._replace(kind="traces"), first._replace(ids=["1", "3"]), first._replace(vectors=first.vectors[::-1])]
    assert len({each.version for each in (first, *others)}) == 4
    assert texts("wash the car", "book a flight").version == first.version


def test_an_audit_recomputes_pinned_traces_and_names_those_that_it_cannot() -> None:
    shelf = Shelf(tasks=texts("book a flight"), runs=texts("wash the car", kind="traces"))
    log = MemoryLog(WINDOW)
    decision = decide(decider_with(shelf, limits=NOTED, log=log), "book a flight")
    entries = log.append((), None)[1].entries
    assert audit_pinned([decision], entries, shelf) == (1, [], 1)
    runs = decision.pinned[1]
    forged = decision.model_copy(update={"pinned": (runs.model_copy(update={"similarity": runs.similarity - 0.1}),)})
    agreeing, (difference,), unchecked = audit_pinned([forged], entries, shelf)
    assert (agreeing, unchecked, difference["pinned"]) == (0, 0, "runs")
    assert difference["recomputed"] == pytest.approx(runs.similarity)
    shelf["runs"] = texts("another", kind="traces")
    assert audit_pinned([decision], entries, shelf) == (0, [], 2)
