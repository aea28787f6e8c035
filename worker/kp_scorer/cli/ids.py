"""Ids as people give them: a beginning that only one of them has is enough; of a trace's ``kp:trace:`` may be left out."""

from collections.abc import Callable, Iterable
from typing import Final

import click

from kp_scorer.cli.output import say
from kp_scorer.store import RedisLedger
from kp_scorer.trace import TRACE_ID_PREFIX

_NAMED: Final = 10
"""How many ids are named where more than one could be meant."""


def whole_trace_id(given: str, ledger: RedisLedger, elsewhere: Callable[[], Iterable[str]] = tuple) -> str:
    """The id of the trace that is meant; as it was given if nothing is known by that.

    Args:
        given: a whole id, or the beginning of one.
        ledger: where to look. An id that is whole is looked up, and nothing else is read.
        elsewhere: other ids that may be meant; asked for only if the ledger has no record of just this id.

    Raises:
        BadParameter: it is the beginning of several ids, or empty.
        ServiceUnavailable: the ledger cannot be reached.
    """
    whole = _with_prefix(given)
    if ledger.look_up([whole])[0]:
        return whole
    among = set(elsewhere())
    if whole not in among:
        found = ledger.begins(whole, _NAMED + 1)
        if found is None:
            # Of what can be read here one may be the only one that begins so, and yet not the only one that is kept.
            say(f"{given}: this user of Redis may not look for ids that begin so (SCAN): only a whole one will do")
            return given
        among.update(found)
    return whole_among(given, among)


def whole_among(given: str, trace_ids: Iterable[str]) -> str:
    """As :func:`whole_trace_id`, of these ids alone."""
    return _only(given, _with_prefix(given), trace_ids)


def whole_letter_id(given: str, letter_ids: Iterable[str]) -> str:
    """The id of the dead letter that is meant; as it was given if there is none.

    Raises:
        BadParameter: it is the beginning of several ids, or empty.
    """
    return _only(given, _expected(given), letter_ids)


def _with_prefix(given: str) -> str:
    return TRACE_ID_PREFIX + _expected(given.removeprefix(TRACE_ID_PREFIX))


def _expected(given: str) -> str:
    if not given:
        # What a shell makes of a variable that is not set; it must not stand for the only one that there is.
        raise click.BadParameter("expected an id, or its beginning", param_hint="ID")
    return given


def _only(given: str, beginning: str, ids: Iterable[str]) -> str:
    found = {each for each in ids if each.startswith(beginning)}
    if beginning in found:
        return beginning
    if len(found) > 1:
        named = ", ".join(sorted(found)[:_NAMED])
        more = " and others" if len(found) > _NAMED else ""
        raise click.BadParameter(f"{given} may be {named}{more}: give more of the one you mean", param_hint="ID")
    return next(iter(found), given)
