"""Ids that are given by their beginning."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.cli.ids import whole_among, whole_letter_id
from kp_scorer.cli.words import short_id
from kp_scorer.trace import TRACE_ID_PREFIX

ENDS = st.text("ab*[]?:", min_size=1, max_size=12)


@given(st.sets(ENDS.map(TRACE_ID_PREFIX.__add__), min_size=1), st.data())
def test_a_beginning_means_the_only_id_that_has_it_or_nothing(ids: set[str], data: st.DataObject) -> None:
    meant = data.draw(st.sampled_from(sorted(ids)))
    end = meant.removeprefix(TRACE_ID_PREFIX)
    begun = end[: data.draw(st.integers(1, len(end)))]
    for given_as in (begun, TRACE_ID_PREFIX + begun):
        others = {each for each in ids if each.startswith(TRACE_ID_PREFIX + begun)} - {meant}
        if begun == end or not others:
            assert whole_among(given_as, ids) == meant
        elif TRACE_ID_PREFIX + begun not in others:
            with pytest.raises(click.BadParameter, match="give more of the one you mean"):
                whole_among(given_as, ids)


@given(ENDS)
def test_what_the_table_shows_can_be_given(end: str) -> None:
    assert whole_among(short_id(TRACE_ID_PREFIX + end), [TRACE_ID_PREFIX + end]) == TRACE_ID_PREFIX + end


def test_ten_that_may_be_meant_are_named() -> None:
    ids = [f"kp:trace:a{number:02}" for number in range(12)]
    with pytest.raises(click.BadParameter) as refused:
        whole_among("a", ids)
    assert [each for each in ids if each in refused.value.message] == ids[:10]
    assert "and others" in refused.value.message
    with pytest.raises(click.BadParameter) as refused:
        whole_among("a0", ids)
    assert "and others" not in refused.value.message


@pytest.mark.parametrize("nothing", ["", "kp:trace:"])
def test_nothing_is_the_beginning_of_none(nothing: str) -> None:
    with pytest.raises(click.BadParameter, match="expected an id"):
        whole_among(nothing, ["kp:trace:1"])
    with pytest.raises(click.BadParameter, match="expected an id"):
        whole_letter_id("", ["5d41402a"])


def test_what_is_unknown_stays_as_it_was_given() -> None:
    assert whole_among("b", ["kp:trace:a"]) == "b"
    assert whole_letter_id("b", ["5d41402a"]) == "b"


def test_dead_letters_are_meant_by_beginnings_too() -> None:
    assert whole_letter_id("5d", ["5d41402a", "5e41402a"]) == "5d41402a"
    with pytest.raises(click.BadParameter, match="5d41402a, 5e41402a"):
        whole_letter_id("5", ["5d41402a", "5e41402a"])
