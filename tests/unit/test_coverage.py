"""A chosen set holds the runs that cover most and none that adds nothing, and gives each domain its share of places."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.coverage import Coverage, Vectors, apportioned

DIMENSIONS = 4


def vectors_of(*rows: Sequence[float]) -> Vectors:
    vectors = np.array(rows, np.float32).reshape(-1, DIMENSIONS)
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


EAST, NORTH, UP = [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]


def total_cover(vectors: Vectors, places: Sequence[int]) -> float:
    """Compute the sum of all covers from its definition."""
    if not places:
        return 0.0
    return float(np.maximum(vectors @ vectors[list(places)].T, 0).max(axis=1).sum())


@st.composite
def batches(draw: st.DrawFn) -> tuple[Vectors, list[bool]]:
    # Whole numbers between -3 and 3 make equal and opposite vectors likely.
    row = st.lists(st.integers(-3, 3), min_size=DIMENSIONS, max_size=DIMENSIONS).filter(any)
    runs = draw(st.lists(st.tuples(row, st.booleans()), min_size=1, max_size=12))
    return vectors_of(*(vector for vector, _ in runs)), [success for _, success in runs]


@given(batches(), st.integers(0, 12))
def test_each_chosen_run_adds_the_most_at_its_turn(batch: tuple[Vectors, list[bool]], most: int) -> None:
    vectors, eligible = batch
    chosen = Coverage(vectors_of()).choose(vectors, eligible, most)
    assert len(chosen) <= most
    places: list[int] = []
    candidates = [place for place, allowed in enumerate(eligible) if allowed]
    for place, adds in chosen:
        before = total_cover(vectors, places)
        gains = {each: total_cover(vectors, [*places, each]) - before for each in candidates}
        assert abs(gains[place] - adds) < 1e-4
        assert adds > max(gains.values()) - 1e-4
        places.append(place)
    if len(chosen) < most:
        # There was room, so whatever is left adds nothing.
        before = total_cover(vectors, places)
        assert all(total_cover(vectors, [*places, each]) - before < 1e-3 for each in candidates)


@given(batches(), st.integers(1, 12))
def test_the_second_batch_is_chosen_given_the_kept_runs_of_the_first(batch: tuple[Vectors, list[bool]], most: int) -> None:
    vectors, eligible = batch
    coverage = Coverage(vectors_of())
    coverage.choose(vectors, eligible, len(vectors))
    assert coverage.choose(vectors, eligible, most) == []


def test_each_run_is_stood_in_for_by_the_most_similar_kept_one() -> None:
    assert Coverage(vectors_of()).stand_ins(vectors_of(EAST)) == []
    coverage = Coverage(vectors_of(EAST, NORTH))
    stand_ins = coverage.stand_ins(vectors_of(NORTH, [2, 1, 0, 0], UP))
    assert [each.number for each in stand_ins] == [1, 0, 0]
    np.testing.assert_allclose([each.similarity for each in stand_ins], [1.0, 2 / 5**0.5, 0.0], atol=1e-6)


@given(st.lists(st.integers(0, 1_000), max_size=20), st.integers(0, 5_000))
def test_places_are_divided_in_proportion_to_within_one(runs: list[int], most: int) -> None:
    places = apportioned(runs, most)
    total = min(most, sum(runs))
    assert sum(places) == total
    for domain, got in zip(runs, places, strict=True):
        assert got <= domain
        assert abs(got - total * domain / max(1, sum(runs))) < 1
