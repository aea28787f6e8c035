"""What must be true after every disaster: each trace ended once, and every witness tells the same story."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import eq
from typing import Any

from kp_scorer.client import Client, Status
from kp_scorer.settings import Settings
from kp_scorer.store import Counts, Store

from tests.support.outcomes import audited, only_log, published


def check(
    settings: Settings,
    submitted: Collection[str],
    dead: Collection[str] = (),
    *,
    store_lost_writes: bool = False,
    decided_twice: Collection[str] = (),
    taken: Sequence[Mapping[str, Any]] = (),
    replayed: int = 0,
    two_versions: bool = False,
) -> None:
    """Assert that ``dead`` ended as dead letters and all other submitted traces as decisions, once each.

    Call it when the workers have stopped: it takes the decisions that are not ``taken`` off the results queues. If the store
    lost writes, the log may lack entries of decisions that were made before, and of ``decided_twice`` a decision that it lost
    may have been published. So many dead letters were ``replayed``. Of ``two_versions`` each may leave out fields that it does
    not know, also of what the other has decided.
    """
    settings = _patient(settings)
    with Client(settings) as client, Store.open(settings) as store:
        statuses = dict(zip(submitted, client.look_up(list(submitted)), strict=True))
        found = list(store.dead_letters.read())
        letters = Counter(letter.trace_id for letter in found if letter.reason != "conflict")
        decided = _ended_once(statuses, letters, dead)
        _published_as_stored([*taken, *published(settings)], decided, decided_twice, _says_as_much if two_versions else eq)
        _placed_once(settings, store, decided, whole=not store_lost_writes)
        counts = store.ledger.counts()
        # What could not be read has no trace id, and counts too; so does other content under an id that was taken.
        others = letters[""] + sum(letter.reason == "conflict" for letter in found)
        ended = len(dead) + others + replayed
        ends = Counts(len(decided) + ended, 0, len(decided), ended)
        assert counts == ends, f"the counts do not add up: {counts}"


def _patient(settings: Settings) -> Settings:
    """The same settings, of someone who waits for servers that are busy."""
    broker = settings.broker.model_copy(update={"timeout_s": 10.0, "submit_timeout_s": 30.0})
    return settings.model_copy(update={"broker": broker, "redis": settings.redis.model_copy(update={"timeout_s": 10.0})})


def _ended_once(statuses: Mapping[str, Status | None], letters: Counter[str], dead: Collection[str]) -> dict[str, Status]:
    states = {trace_id: status.state if status else "unknown" for trace_id, status in statuses.items()}
    unsettled = {trace_id: state for trace_id, state in states.items() if state not in ("decided", "dead")}
    assert not unsettled, f"neither decided nor dead: {_some(unsettled.items())}"
    decided = {trace_id: status for trace_id, status in statuses.items() if status and status.state == "decided"}
    assert statuses.keys() - decided.keys() == set(dead), (
        f"dead against expectation: {_some(statuses.keys() - decided.keys() - set(dead))}; "
        f"decided against expectation: {_some(decided.keys() & set(dead))}"
    )
    both = decided.keys() & letters.keys()
    assert not both, f"both decided and a dead letter: {_some(both)}"
    odd = {trace_id: letters[trace_id] for trace_id in dead if letters[trace_id] != 1}
    assert not odd, f"not exactly one dead letter: {_some(odd.items())}"
    assert len(decided) + sum(letters[trace_id] for trace_id in statuses) == len(statuses)
    return decided


def _published_as_stored(
    decisions: Iterable[Mapping[str, Any]],
    decided: Mapping[str, Status],
    decided_twice: Collection[str],
    is_same: Callable[[Any, Any], bool],
) -> None:
    versions: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for decision in decisions:
        versions[decision["trace_id"]].append(decision)
    missing = decided.keys() - versions.keys()
    assert not missing, f"decided and never published: {_some(missing)}"
    foreign = versions.keys() - decided.keys()
    assert not foreign, f"published and not decided: {_some(foreign)}"
    for trace_id, found in versions.items():
        stored = decided[trace_id].decision
        assert stored is not None
        expected = stored.model_dump(mode="json")
        agreeing = [is_same(decision, expected) for decision in found]
        enough = any(agreeing) if trace_id in decided_twice else all(agreeing)
        assert enough, f"published otherwise than stored: {trace_id}"


def _says_as_much(one: Any, other: Any) -> bool:
    """Whether two decisions say the same, as far as both say it."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_says_as_much(one[name], other[name]) for name in one.keys() & other.keys())
    return bool(one == other)


def _placed_once(settings: Settings, store: Store, decided: Mapping[str, Status], *, whole: bool) -> None:
    entries = Counter(entry.trace_id for entry in only_log(store).entries())
    twice = {trace_id: count for trace_id, count in entries.items() if count != 1}
    assert not twice, f"more than one entry in the log: {_some(twice.items())}"
    report = audited(settings, store)
    assert not report.differences, f"novelty is not what the log gives: {_some(report.differences)}"
    if whole:
        assert entries.keys() >= decided.keys(), f"decided without a place: {_some(decided.keys() - entries.keys())}"
        assert (report.agreeing, report.beyond) == (len(decided), 0), f"not all decisions can be audited: {report}"


def _some(items: Iterable[Any]) -> str:
    listed = list(items)
    shown = ", ".join(map(str, listed[:5]))
    return f"{len(listed)} ({shown}{', …' if len(listed) > 5 else ''})"
