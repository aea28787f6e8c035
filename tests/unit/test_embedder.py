"""The text or the embedder is blamed for a failure, texts are grouped by length, and only the process's own cores count."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.embedding.embedder import RECIPES, TRACE, CheckedEmbedder, Embedder, TokenizedText, Vectors
from kp_scorer.embedding.select import usable_cores
from kp_scorer.embedding.text_embedder import group_by_length
from kp_scorer.errors import EmbedderUnhealthy
from kp_scorer.settings.sections import RecipeName

from tests.support.builders import load_embedder, make_trace, step

BAD: Final = "bad"


class FailingEmbedder(Embedder):
    """An embedder that gives every text the first unit vector, unless it is told to fail."""

    name, space, dimensions = "one", "one-1", 4
    recipe = TRACE

    def __init__(self, fails_at: Callable[[str], bool] = BAD.__eq__, instead: Vectors | None = None) -> None:
        self.fails_at = fails_at
        self.instead = instead
        self.calls = 0
        self.last = ""

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.calls += 1
        self.last = texts[-1]
        vectors = np.tile(np.eye(1, 4, dtype=np.float32), (len(texts), 1))
        if not any(map(self.fails_at, texts)):
            return vectors
        if self.instead is None:
            raise RuntimeError("out of order")
        return np.tile(self.instead, (len(texts), 1))


def tokenized(*texts: str) -> list[TokenizedText]:
    return [TokenizedText(text, ()) for text in texts]


def fails(checked: CheckedEmbedder, *texts: str, alone: bool = False) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one it is says the caller
        checked.embed(tokenized(*texts), alone=alone)
    return caught.value


def fails_together(checked: CheckedEmbedder, count: int) -> list[Exception]:
    """Embed texts that fail together, and then each of them alone, as a worker does; return the errors."""
    return [fails(checked, *[BAD] * count), *(fails(checked, BAD, alone=True) for _ in range(count))]


def test_text_is_at_fault_if_it_fails_alone_and_the_probe_passes() -> None:
    checked = CheckedEmbedder(FailingEmbedder())
    assert isinstance(fails(checked, "good", BAD), RuntimeError)
    assert isinstance(fails(checked, BAD, alone=True), RuntimeError)
    assert len(checked.embed(tokenized("good"), alone=True)) == 1


def test_embedder_that_fails_at_the_probe_is_unhealthy_and_not_used_again() -> None:
    embedder = FailingEmbedder(lambda text: True)
    checked = CheckedEmbedder(embedder)
    assert not isinstance(fails(checked, "a", "b"), EmbedderUnhealthy)
    assert isinstance(fails(checked, "a", alone=True), EmbedderUnhealthy)
    assert len(embedder.last.split()) > 512, "the probe is longer than a model reads"
    calls = embedder.calls
    assert isinstance(fails(checked, "b", alone=True), EmbedderUnhealthy)
    assert isinstance(fails(checked, "c", "d"), EmbedderUnhealthy)
    assert embedder.calls == calls


INVALID: Final = {
    "not a number": [[np.nan, 0, 0, 0]],
    "infinite": [[np.inf, 0, 0, 0]],
    "short": [[0.9, 0, 0, 0]],
    "nothing": [[0, 0, 0, 0]],
    "too many": [[1, 0, 0, 0], [1, 0, 0, 0]],
}


@pytest.mark.parametrize("instead", INVALID.values(), ids=INVALID)
def test_invalid_vectors_are_a_failure(instead: list[list[float]]) -> None:
    bad = np.array(instead, np.float32)
    assert isinstance(fails(CheckedEmbedder(FailingEmbedder(instead=bad)), "good", BAD), FloatingPointError)
    assert isinstance(fails(CheckedEmbedder(FailingEmbedder(lambda text: True, bad)), "good", alone=True), EmbedderUnhealthy)


def test_vectors_within_the_tolerance_are_valid() -> None:
    checked = CheckedEmbedder(FailingEmbedder(instead=np.array([[1.009, 0, 0, 0]], np.float32)))
    assert checked.embed(tokenized(BAD)).shape == (1, 4)


def test_embedder_that_embeds_nothing_but_the_probe_is_unhealthy() -> None:
    checked = CheckedEmbedder(FailingEmbedder())
    failures = [*fails_together(checked, 4), *fails_together(checked, 4)]
    assert [isinstance(error, EmbedderUnhealthy) for error in failures] == [False] * 9 + [True]


def test_one_success_resets_the_count_of_failures() -> None:
    checked = CheckedEmbedder(FailingEmbedder())
    for _ in range(5):
        fails_together(checked, 7)
        checked.embed(tokenized("good"))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "nonsense"}, 64),
        # systemd nests groups, and each group has a limit of its own.
        ({"own": "0::/scorer.slice/worker.service\n", "scorer.slice/worker.service/cpu.max": "200000 100000\n"}, 2),
        ({"own": "0::/scorer.slice/worker.service\n", "scorer.slice/cpu.max": "300000 100000\n"}, 3),
        ({"own": "1:name=systemd:/a\n0::/b\n", "a/cpu.max": "100000 100000\n", "b/cpu.max": "max 100000\n"}, 64),
    ],
)
def test_a_containers_share_of_processor_time_counts(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "ascii")
    assert usable_cores(tmp_path, tmp_path / "own") == cores


def test_cores_that_the_process_may_not_run_on_do_not_count(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)


@given(st.lists(st.integers(2, 40), max_size=40), st.integers(1, 100), st.sampled_from([1, 4, 16, 512]))
def test_every_text_is_in_the_first_group_that_it_fits_from_the_shortest_on(
    lengths: list[int], max_tokens: int, step: int
) -> None:
    indices = list(group_by_length(lengths, max_tokens, step))
    assert sorted(index for group in indices for index in group) == list(range(len(lengths)))
    groups = [[lengths[index] for index in group] for group in indices]
    assert [length for group in groups for length in group] == sorted(lengths)
    for group in groups:
        assert len(group) == 1 or len(group) * max(group) <= max_tokens
        assert len({ceil(length / step) for length in group}) == 1
    for group, following in pairwise(groups):
        is_full = (len(group) + 1) * following[0] > max_tokens
        assert is_full or ceil(group[-1] / step) != ceil(following[0] / step)


def test_asked_and_did_is_the_weighted_sum_of_two_vectors() -> None:
    by_trace, by_both = embedder("trace"), embedder("asked_and_did")
    # One text contains the character that separates the two in the recipe.
    asked, did = "Book the cheapest flight \x1e to Oslo", "search_flights from Bergen on a Monday"
    trace = make_trace(objective=asked, steps=[step("tool_call", "search", content=did), step("observation", content="none")])

    (vector,) = by_both.embed([RECIPES["asked_and_did"].text(trace)])

    first, second = by_trace.embed([asked, did])
    wanted = 0.6 * first + 0.4 * second
    np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), atol=2e-3)
    assert by_both.space == f"{by_trace.space}.asked_and_did.1"


@cache
def embedder(recipe: RecipeName) -> Embedder:
    return load_embedder(recipe)


def test_a_plain_text_has_one_vector_whatever_the_recipe() -> None:
    # The first text is longer than the part of an objective that the recipe reads.
    texts = ["book a flight " * 60, "wash the car"]
    expected = embedder("trace").embed(texts)
    for recipe in RECIPES:
        by_recipe = embedder(recipe)
        plain = by_recipe.tokenize_all(texts, plain=True)
        for vectors in (by_recipe.embed_tokenized(plain), by_recipe.run(plain, together=True)):
            assert np.all((vectors * expected).sum(axis=1) > 0.999)
