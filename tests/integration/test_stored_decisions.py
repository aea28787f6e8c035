"""All decisions of a ledger, as a program and as the command line read them."""

from kp_scorer import rows, stored_decisions
from kp_scorer.settings import Settings
from kp_scorer.store import Identity, Store, Verdict

from tests.support.builders import decision_on


def keep(store: Store, count: int) -> set[str]:
    """Have the ledger keep so many decisions; return the ids of their traces."""
    trace_ids = [f"kp:trace:{number}" for number in range(count)]
    store.ledger.begin([Identity(trace_id, bytes(16)) for trace_id in trace_ids])
    store.ledger.commit([Verdict(trace_id, bytes(16), decision_on(trace_id), "") for trace_id in trace_ids])
    return set(trace_ids)


def test_every_stored_decision_is_read_as_it_was_made(settings: Settings, store: Store) -> None:
    trace_ids = keep(store, 5)
    # One that is pending has none.
    store.ledger.begin([Identity("kp:trace:pending", bytes(16))])
    found = list(stored_decisions(settings))
    assert {decision.trace_id for decision in found} == trace_ids
    assert {decision.model_dump_json().encode() for decision in found} == {decision_on(trace_id) for trace_id in trace_ids}
    assert {row.trace_id for row in rows(found)} == trace_ids


def test_an_empty_ledger_holds_none(settings: Settings) -> None:
    assert list(stored_decisions(settings)) == []
