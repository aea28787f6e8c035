"""The cache of vectors in memory behaves like the one of KnowledgePulse's SDK."""

import time
from typing import Any

import pytest
from kp_scorer import VectorCache


def test_similarity_is_that_of_the_nearest_vector_in_it() -> None:
    cache = VectorCache(dimensions=2)
    assert (cache.size, cache.max_cosine_similarity([1, 0])) == (0, 0.0)
    cache.add([0, 3])
    cache.add([3.0, 4.0])
    assert cache.size == 2
    assert cache.max_cosine_similarity([2, 0]) == pytest.approx(0.6)
    assert cache.max_cosine_similarity([0, 1]) == pytest.approx(1.0)
    assert cache.max_cosine_similarity([0, 0]) == 0.0
    cache.clear()
    assert (cache.size, cache.max_cosine_similarity([0, 1])) == (0, 0.0)


def test_opposite_vectors_have_a_similarity_of_less_than_none() -> None:
    cache = VectorCache(dimensions=2)
    cache.add([1, 0])
    assert cache.max_cosine_similarity([-1, 0]) == pytest.approx(-1.0)


def test_the_newest_elements_stay_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    cache = VectorCache(max_elements=2, dimensions=2, ttl_ms=1_000)
    for vector in ([1, 0], [0, 1], [-1, 0]):
        cache.add(vector)
    assert cache.size == 2
    assert cache.max_cosine_similarity([1, 0]) == pytest.approx(0.0)
    now_s += 0.5
    cache.add([1, 1])
    now_s += 0.75
    assert cache.size == 1
    assert cache.max_cosine_similarity([1, 0]) == pytest.approx(0.7071, abs=1e-4)
    now_s += 0.75
    assert cache.size == 0


@pytest.mark.parametrize("vector", [[1.0], [[1.0, 2.0]], [float("nan"), 1.0], []])
def test_vector_of_another_kind_is_refused(vector: Any) -> None:
    cache = VectorCache(dimensions=2)
    with pytest.raises(ValueError, match="expected a vector of 2 finite numbers"):
        cache.add(vector)
    assert cache.size == 0


@pytest.mark.parametrize("fields", [{"max_elements": 0}, {"dimensions": 0}, {"ttl_ms": 0}])
def test_cache_without_room_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        VectorCache(**fields)
