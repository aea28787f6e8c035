"""Grouping of texts for the engine, recipes, and vectors back in order."""

from itertools import pairwise
from math import ceil

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.embedding import RECIPES, Embedder, select_embedder
from kp_scorer.embedding.text_embedder import group_by_length
from kp_scorer.settings import EmbeddingSettings, RecipeName

from tests.support.builders import make_trace, step

LENGTHS = st.lists(st.integers(2, 40), max_size=40)
BOUNDS = {"max_tokens": st.integers(1, 100), "step": st.sampled_from([1, 4, 16, 512])}


@given(lengths=LENGTHS, **BOUNDS)
def test_every_text_is_in_one_group_and_groups_are_within_their_bound(lengths: list[int], max_tokens: int, step: int) -> None:
    groups = list(group_by_length(lengths, max_tokens, step))
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        found = [lengths[index] for index in group]
        assert len(group) == 1 or len(group) * max(found) <= max_tokens
        assert len({ceil(length / step) for length in found}) == 1


@given(lengths=LENGTHS, **BOUNDS)
def test_groups_come_shortest_first(lengths: list[int], max_tokens: int, step: int) -> None:
    order = [lengths[index] for group in group_by_length(lengths, max_tokens, step) for index in group]
    assert order == sorted(order)


@given(lengths=LENGTHS, **BOUNDS)
def test_no_text_is_left_out_of_a_group_it_fits(lengths: list[int], max_tokens: int, step: int) -> None:
    groups = [[lengths[index] for index in group] for group in group_by_length(lengths, max_tokens, step)]
    for group, following in pairwise(groups):
        is_full = (len(group) + 1) * following[0] > max_tokens
        assert is_full or ceil(group[-1] / step) != ceil(following[0] / step)


def test_asked_and_did_is_the_weighted_sum_of_two_vectors() -> None:
    by_trace, by_both = embedder("trace"), embedder("asked_and_did")
    # Long enough to be cut in the middle, and with the character that separates the two.
    asked, did = "Book the cheapest flight \x1e to Oslo", "search_flights from Bergen on a Monday"
    trace = make_trace(objective=asked, steps=[step("tool_call", "search", content=did), step("observation", content="none")])

    (found,) = by_both.embed([RECIPES["asked_and_did"].text(trace)])

    first, second = by_trace.embed([asked, did])
    wanted = 0.6 * first + 0.4 * second
    np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), atol=2e-3)
    assert by_both.space == f"{by_trace.space}.asked_and_did.1"


def test_a_text_that_is_no_trace_s_is_one_that_was_asked() -> None:
    by_both = embedder("asked_and_did")
    assert np.allclose(np.linalg.norm(by_both.embed(["a probe", "a\x1eprobe\x1eof three"]), axis=1), 1)


def embedder(recipe: RecipeName) -> Embedder:
    found = select_embedder(EmbeddingSettings(), recipe)
    assert found
    return found
