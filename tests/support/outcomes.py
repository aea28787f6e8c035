"""Reads what workers have left (the novelty log, its audit, their decisions) and asserts that all of it agrees.

After every disaster each trace has ended once, and the ledger, the log and the results queues agree.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.client import Client, Status
from kp_scorer.client.decisions import open_results
from kp_scorer.decision import Decision, DecisionKind
from kp_scorer.gate.gate_audit import audit_gate
from kp_scorer.novelty.verification import Report, audit
from kp_scorer.settings import Settings
from kp_scorer.spans.context import NO_CONTEXT
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLetter
from kp_scorer.store.novelty_log import RedisLog
from kp_scorer.store.records import SubmissionCounts

from tests.support.changed_settings import with_changed
from tests.support.gates import kept_in
from tests.support.processes import wait_until


def only_log(store: Store) -> RedisLog:
    """Return the novelty log of the store, which must have exactly one."""
    (log,) = store.novelty_logs()
    return log


def audited(settings: Settings, store: Store) -> Report:
    entries = list(only_log(store).entries())
    return audit(entries, store.ledger.decided, settings.novelty.window(), lambda done, total: None)


def place_in_log(decision: Decision) -> int:
    assert decision.novelty.entry
    return int(decision.novelty.entry.partition("-")[2])


def publish(publisher: Publisher, decision: Decision) -> None:
    """Publish a decision, or raise the error by which that failed."""
    (error,) = publisher.publish_all([publisher.publication(decision, NO_CONTEXT, None, set())])
    if error is not None:
        raise error


def published(settings: Settings, outcome: DecisionKind | None = None) -> list[dict[str, Any]]:
    """Consume and return the decisions on all results queues, or on that of one outcome."""
    decisions = []
    with make_celery(settings) as app, open_results(app, settings, outcome) as results:
        for decision, acknowledge in results.receive():
            acknowledge()
            decisions.append(decision.model_dump(mode="json"))
    return decisions


def read_until(settings: Settings, trace_ids: Collection[str]) -> list[dict[str, Any]]:
    """Consume decisions until exactly these traces have one; return all."""
    read: list[dict[str, Any]] = []

    def is_all_read() -> bool:
        read.extend(published(settings))
        return {decision["trace_id"] for decision in read} == set(trace_ids)

    wait_until(is_all_read)
    return read


def check(
    settings: Settings,
    submitted: Collection[str],
    dead: Collection[str] = (),
    *,
    store_lost_writes: bool = False,
    decided_twice: Collection[str] = (),
    consumed: Sequence[Mapping[str, Any]] = (),
    replayed: int = 0,
    revised: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Assert that ``dead`` ended as dead letters and all other submitted traces as decisions, each exactly once.

    The workers must have stopped, because this consumes the decisions on the results queues; ``consumed`` has those that were
    read before. If the store lost writes, the log may lack entries of earlier decisions, and the traces of ``decided_twice``
    may have been published with a decision that the store has lost. ``replayed`` is the number of dead letters that were
    replayed. ``revised`` has the ids of late outcomes, each with the trace that it revised exactly once.
    """
    # Servers that are busy after a disaster may take long to answer.
    settings = with_changed(settings, broker__timeout_s=30.0)
    with Client(settings) as client, Store.open(settings) as store:
        statuses = dict(zip(submitted, client.look_up(list(submitted)), strict=True))
        _revised_once(settings, store, revised)
        # The remaining checks look at first decisions, as if there were no revisions.
        for each in store.ledger.decided(list(revised.values())):
            assert each
            assert each.first
            statuses[each.first.trace_id] = Status(each.first.trace_id, "decided", each.first)
        decided = {trace_id: status for trace_id, status in statuses.items() if status and status.state == "decided"}
        dead_letters = list(store.dead_letters.read())
        _ended_once(statuses, decided, dead, dead_letters)
        _published_as_stored([*consumed, *published(settings)], decided, decided_twice)
        _placed_once(settings, store, decided, complete=not store_lost_writes)
        if settings.routing.gate == "coverage" and not store_lost_writes:
            _kept_as_decided(store, decided)
        counts = store.ledger.counts()
        # Unreadable messages, which have no trace id, count too, and so does other content under the id of a submitted trace.
        ended = len(dead) + replayed + sum(letter.reason == "conflict" or not letter.trace_id for letter in dead_letters)
        all_decided = len(decided) + len(revised)
        ends = SubmissionCounts(all_decided + ended, 0, all_decided, ended)
        assert counts == ends, f"the counts do not add up: {counts}"


def _revised_once(settings: Settings, store: Store, revised: Mapping[str, str]) -> None:
    stored = dict(zip(revised, store.ledger.look_up(list(revised)), strict=True))
    newest = dict(zip(revised, store.ledger.decided(list(revised.values())), strict=True))
    copies = defaultdict[str, list[Decision]](list)
    for each in map(Decision.model_validate, published(settings, "revised") if revised else ()):
        assert each.revised_by
        copies[each.revised_by.id].append(each)
    _none("no late outcome of ours", copies.keys() - revised.keys())
    for outcome_id, trace_id in revised.items():
        record, trace = stored[outcome_id], newest[outcome_id]
        assert record, f"{outcome_id} is unknown"
        assert trace, f"{trace_id} is not decided"
        assert record.decision, f"{outcome_id} is {record.state}: {record.reason} {record.detail}"
        assert record.decision == trace.decision, f"{trace_id} has another decision than its revision"
        assert (record.decision.trace_id, record.decision.revision) == (trace_id, 2)
        assert copies[outcome_id], f"the revision of {trace_id} was never published"
        assert {each.model_dump_json() for each in copies[outcome_id]} == {record.decision.model_dump_json()}


def _ended_once(
    statuses: Mapping[str, Status | None],
    decided: Collection[str],
    dead: Collection[str],
    dead_letters: Sequence[DeadLetter],
) -> None:
    states = {trace_id: status.state if status else "unknown" for trace_id, status in statuses.items()}
    _none("neither decided nor dead", (item for item in states.items() if item[1] not in ("decided", "dead")))
    reasons = {letter.trace_id: letter.reason for letter in dead_letters}
    undecided = statuses.keys() - set(decided)
    _none("dead against expectation", ((trace_id, reasons.get(trace_id)) for trace_id in undecided - set(dead)))
    _none("decided against expectation", set(dead) - undecided)
    letters = Counter(letter.trace_id for letter in dead_letters if letter.reason != "conflict")
    _none("both decided and a dead letter", set(decided) & letters.keys())
    _none("not exactly one dead letter", ((trace_id, letters[trace_id]) for trace_id in dead if letters[trace_id] != 1))


def _published_as_stored(
    decisions: Iterable[Mapping[str, Any]], decided: Mapping[str, Status], decided_twice: Collection[str]
) -> None:
    versions: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for decision in decisions:
        versions[decision["trace_id"]].append(decision)
    _none("decided and never published", decided.keys() - versions.keys())
    _none("published and not decided", versions.keys() - decided.keys())
    for trace_id, copies in versions.items():
        stored = decided[trace_id].decision
        assert stored is not None
        expected = stored.model_dump(mode="json")
        enough = any if trace_id in decided_twice else all
        assert enough(decision == expected for decision in copies), f"published otherwise than stored: {trace_id}"


def _placed_once(settings: Settings, store: Store, decided: Mapping[str, Status], *, complete: bool) -> None:
    entries = Counter(entry.trace_id for entry in only_log(store).entries())
    _none("more than one entry in the log", (item for item in entries.items() if item[1] != 1))
    report = audited(settings, store)
    _none("novelty differs from what the log gives", report.differences)
    if complete:
        _none("decided without a place", decided.keys() - entries.keys())
        assert (report.agreeing, report.beyond) == (len(decided), 0), f"not all decisions can be audited: {report}"


def _kept_as_decided(store: Store, decided: Mapping[str, Status]) -> None:
    """Assert that each decision left one fact, from which an audit can recompute it, and that the gate keeps accepted traces.

    The facts say which first decisions accept, and the notes on them say which revisions do. Once the stream of
    facts is full, the oldest entries are gone, so some decisions have no fact.
    """
    (facts,) = store.all_facts()
    entries = list(facts.all())
    is_trimmed = len(entries) >= facts.bounds.most_facts
    first_facts = [each.fact for each in entries if each.fact and not each.is_late]
    stored = {fact.trace_id: fact for fact in first_facts}
    assert len(first_facts) == len(stored), "more than one fact for a decision"
    _none("a fact without its decision", stored.keys() - decided.keys())
    assert is_trimmed or stored.keys() == decided.keys(), "not one fact for each decision"
    accepted = {trace_id for trace_id in stored if (first := decided[trace_id].decision) and first.outcome == "accepted"}
    assert {fact.trace_id for fact in stored.values() if fact.is_kept} == accepted
    newest = [each.decision for each in store.ledger.decided(list(decided)) if each]
    assert kept_in(facts.all_kept()) == sorted(each.trace_id for each in newest if each.outcome == "accepted")
    report = audit_gate(entries, list(facts.all_kept()), store.ledger.decided, facts.bounds)
    _none("the gate decided otherwise than the facts give", report.differences)
    checked = report.agreeing + report.beyond if is_trimmed else report.agreeing
    assert checked == len(stored), f"not all decisions of the gate can be audited: {report}"


def _none(complaint: str, items: Iterable[Any]) -> None:
    """Assert that there are no items; otherwise fail with the complaint and the first few."""
    listed = list(items)
    assert not listed, f"{complaint}: {len(listed)} ({', '.join(map(str, listed[:5]))}{', …' if len(listed) > 5 else ''})"
