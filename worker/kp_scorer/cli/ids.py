"""Resolves ids as people type them.

A command that looks up a trace accepts the beginning of its id, without ``kp:trace:`` and namespaces, if no other id has this
beginning. An id with ``kp:trace:`` is exact: it never stands for another.
"""

from collections.abc import Callable, Iterable
from typing import Final

import click

from kp_scorer.cli.output import print_note
from kp_scorer.store.ledger import RedisLedger
from kp_scorer.trace import TRACE_ID_PREFIX, has_beginning

_MOST_NAMED: Final = 10


def resolve_trace_id(id_or_beginning: str, ledger: RedisLedger, ids_elsewhere: Callable[[], Iterable[str]] = tuple) -> str:
    """Return the id of the only trace that matches, or the argument itself if none does; raise BadParameter if several do.

    ``ids_elsewhere`` reads further ids that may match, if the ledger has no record of the exact id.
    """
    exact = exact_trace_id(id_or_beginning)
    if id_or_beginning == exact or ledger.look_up([exact])[0]:
        return exact
    candidates = set(ids_elsewhere())
    if exact not in candidates:
        in_ledger = ledger.ids_beginning(id_or_beginning, _MOST_NAMED + 1)
        if in_ledger is None:
            # Without SCAN nobody knows how many ids in the ledger have this beginning.
            print_note(f"{id_or_beginning}: this user of Redis may not search for beginnings of ids (SCAN); give the exact id")
            return id_or_beginning
        candidates.update(in_ledger)
    return resolve_among(id_or_beginning, candidates)


def resolve_among(id_or_beginning: str, ids: Iterable[str]) -> str:
    """Return the only one of these ids that matches, or the argument itself if none does; raise BadParameter if several do."""
    exact = exact_trace_id(id_or_beginning)
    if id_or_beginning == exact:
        return exact
    matches = {each for each in ids if has_beginning(each, id_or_beginning)}
    if exact in matches:
        return exact
    if len(matches) > 1:
        named = ", ".join(sorted(matches)[:_MOST_NAMED])
        more = " and others" if len(matches) > _MOST_NAMED else ""
        raise click.BadParameter(f"{id_or_beginning} may be {named}{more}: give more of the one you mean", param_hint="ID")
    return next(iter(matches), id_or_beginning)


def exact_trace_id(typed_id: str) -> str:
    """Return an id with ``kp:trace:``, whether it was typed with the prefix or without it."""
    own = typed_id.removeprefix(TRACE_ID_PREFIX)
    if not own:
        # An unset variable of a shell becomes an empty text, which would match the only id that there is.
        raise click.BadParameter("expected an id, or its beginning", param_hint="ID")
    try:
        own.encode()
    except UnicodeEncodeError:
        raise click.BadParameter("expected Unicode", param_hint="ID") from None
    return TRACE_ID_PREFIX + own
