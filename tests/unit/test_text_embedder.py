"""Grouping of texts for the engine, and vectors back in order."""

from itertools import pairwise
from math import ceil

from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.embedding.text_embedder import group_by_length

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
