"""The coverage gate accepts what adds to the kept traces, up to a share of each domain, and knows only what the facts say."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decision import Decision, GateResult
from kp_scorer.gate import Fact, Gate, GateBounds, GatePolicy, MemoryFacts
from kp_scorer.gate.facts import Entries, Entry, Facts, StoredFact, Vectors
from kp_scorer.gate.gate_audit import audit_gate
from kp_scorer.novelty.log import Place
from kp_scorer.novelty.verification import DecidedTrace

from tests.support.builders import decision
from tests.support.gates import same_is_known

WEEK_MS: Final = 7 * 86_400_000
NOW_MS: Final = 1_790_000_000_000
BOUNDS: Final = GateBounds(kept_elements=1_000, kept_ttl_ms=8 * WEEK_MS)
EAST, NORTH, UP = (np.array(row, np.float32) for row in ([1, 0, 0], [0, 1, 0], [0, 0, 1]))
NORTH_EAST: Final = np.array([0.6, 0.8, 0], np.float32)


class Fleet:
    """Several gates, which read one log of facts whenever they like, and the decisions that they have made."""

    def __init__(self, policy: GatePolicy, bounds: GateBounds = BOUNDS) -> None:
        self.policy, self.bounds = policy, bounds
        self.stored: list[StoredFact] = []
        self.kept_facts: list[StoredFact] = []
        self.decisions: dict[str, Decision] = {}
        self.newest: dict[str, tuple[Place, bool]] = {}
        """The place of the newest fact of each trace, and whether the trace is accepted now."""
        self.now_ms = NOW_MS

    def read(self, after: Place | None) -> Facts:
        if after and all(each.place != after for each in self.stored):
            return Facts((), restart=True)
        newer = [each for each in self.stored if after is None or each.place > after]
        kept_entries = [] if after else [entry_of(each) for each in self.kept_facts]
        return Facts([entry_of(each) for each in newer[:3]], kept_entries, more=len(newer) > 3)

    def gate(self) -> Gate:
        return Gate(self, 3, self.bounds, self.policy)

    def decide(self, gate: Gate, traces: Sequence[tuple[str, Vectors, bool]]) -> list[GateResult]:
        """Decide traces by what the gate has read, and store the facts.

        Each trace is a domain, a vector, and whether it succeeded.
        """
        named = [(f"kp:trace:{len(self.decisions) + number}", *each) for number, each in enumerate(traces)]
        batch, verdicts = gate.weigh([(trace_id, domain, vector) for trace_id, domain, vector, _ in named]), list[GateResult]()
        for number, (trace_id, domain, _, success) in enumerate(named):
            verdict = batch.weigh(number, success, 1.0)
            fact = batch.settle(number, is_eligible=success, is_kept=verdict.accepts)
            outcome = "accepted" if verdict.accepts else "rejected"
            self.decisions[trace_id] = decision(trace_id, domain=domain, outcome=outcome, gate=verdict)
            self.store(fact)
            verdicts.append(verdict)
        return verdicts

    def store(self, fact: Fact) -> None:
        stored = StoredFact(Place(self.now_ms, len(self.decisions)), fact)
        self.newest[fact.trace_id] = stored.place, fact.is_kept
        self._append(stored, is_of_kept=fact.is_kept)

    def _append(self, stored: StoredFact, *, is_of_kept: bool) -> None:
        self.stored = [*self.stored, stored][-self.bounds.most_facts :]
        if is_of_kept:
            self.kept_facts = [*self.kept_facts, stored][-self.bounds.kept_elements :]

    def revise(self, trace_id: str) -> None:
        """Note that a late outcome makes a trace accepted, or no longer accepted."""
        place, is_accepted = self.newest[trace_id]
        now = self._note_at()
        facts = [each.fact for each in (*self.kept_facts, *([] if is_accepted else self.stored)) if each.place == place]
        if is_accepted and facts:
            self._append(StoredFact(now, dropped=place), is_of_kept=True)
        elif facts and facts[0]:
            self._append(StoredFact(now, facts[0]._replace(is_kept=True), is_late=True), is_of_kept=True)
            place = now
        self.newest[trace_id] = place, not is_accepted

    def revise_among(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (trace_id := f"kp:trace:{number}") in self.newest:
                self.revise(trace_id)

    def erase(self, place: Place) -> None:
        self.stored = [each for each in self.stored if place not in (each.place, each.dropped)]
        self.kept_facts = [each for each in self.kept_facts if place not in (each.place, each.dropped)]
        self.stored.append(StoredFact(self._note_at(), erased=place))

    def _note_at(self) -> Place:
        self.now_ms += 2
        return Place(self.now_ms - 1, 0)

    def audit(self) -> dict[str, int]:
        def decided(trace_ids: Sequence[str]) -> list[DecidedTrace | None]:
            return [DecidedTrace(self.decisions[each], b"") if each in self.decisions else None for each in trace_ids]

        report = audit_gate(self.stored, self.kept_facts, decided, self.bounds)
        assert not report.differences
        return {"agreeing": report.agreeing, "beyond": report.beyond, "undecided": report.undecided}


def entry_of(stored: StoredFact) -> Entry:
    """Return an entry in the form that Redis stores."""
    fields: list[str | bytes] = []
    if fact := stored.fact:
        fields = ["i", fact.trace_id, "d", fact.domain, "f", fact.packed(), *(["r", "1-1"] if stored.is_late else [])]
    elif stored.dropped:
        fields = ["i", "kp:trace:0", "r", str(stored.dropped)]
    elif stored.erased:
        fields = ["e", str(stored.erased)]
    return str(stored.place).encode(), [each if isinstance(each, bytes) else each.encode() for each in fields]


def one_at_a_time(fleet: Fleet, *traces: tuple[Vectors, bool]) -> list[bool]:
    gate = fleet.gate()
    outcomes = []
    for vector, success in traces:
        gate.catch_up()
        (weighed,) = fleet.decide(gate, [("code", vector, success)])
        outcomes.append(success and weighed.adds >= weighed.bar)
    return outcomes


def test_a_success_after_failures_adds_much_and_a_copy_of_it_nothing() -> None:
    fleet = Fleet(GatePolicy(share=0.1, bar=1.5))
    gate = fleet.gate()
    assert one_at_a_time(fleet, (EAST, False), (EAST, False), (NORTH, True), (EAST, True), (EAST, True)) == [
        *(False, False, False, True, False)
    ]
    gate.catch_up()
    (copy,), (different,) = (fleet.decide(gate, [("code", vector, True)]) for vector in (EAST, NORTH))
    assert copy.adds == pytest.approx(0, abs=1e-3)
    assert copy.nearest
    assert copy.nearest.trace_id == "kp:trace:3"
    assert copy.nearest.similarity == pytest.approx(1, abs=1e-3)
    # The trace covers itself and the first trace to the north.
    assert different.adds == pytest.approx(2, abs=1e-3)


def test_domains_know_nothing_of_each_other() -> None:
    fleet = Fleet(GatePolicy(share=0.1))
    gate = fleet.gate()
    fleet.decide(gate, [("code", EAST, True), ("law", EAST, True)])
    assert [each.fact.is_kept for each in fleet.stored if each.fact] == [True, True]


def test_traces_decided_together_rest_on_each_other() -> None:
    fleet = Fleet(GatePolicy(share=0.1, bar=0.5))
    weighed = fleet.decide(fleet.gate(), [("code", EAST, True), ("code", EAST, True), ("code", NORTH_EAST, True)])
    assert [each.adds for each in weighed] == pytest.approx([1, 0, 0.4], abs=1e-3)
    assert weighed[2].nearest
    assert weighed[2].nearest.trace_id == "kp:trace:0"


@pytest.mark.parametrize(("requires", "admitted"), [("success", [True, False]), (0.5, [False, True])])
def test_the_requirement_is_success_or_a_least_outcome_dimension(requires: float, admitted: list[bool]) -> None:
    policy = GatePolicy(share=0.1, requires=requires)
    assert [policy.admits(success, outcome) for success, outcome in ((True, 0.4), (False, 0.6))] == admitted


def test_traces_that_were_kept_long_ago_do_not_keep_others_out() -> None:
    fleet = Fleet(GatePolicy(share=0.1, bar=0.5))
    assert one_at_a_time(fleet, (EAST, True)) == [True]
    for weeks, expected in ((1, 0.29), (2, 0.5), (4, 0.75), (9, 1)):
        fleet.now_ms = NOW_MS + weeks * WEEK_MS
        gate = fleet.gate()
        fleet.store(Fact("kp:trace:far", "law", Place(0, 0), 0.0, 0.0, 1_000, 0, False, UP))
        gate.catch_up()
        added = gate.weigh([("kp:trace:again", "code", EAST)]).weigh(0, True, 1.0).adds
        # The first run counts as a request for the task, too, and counts less the longer ago it was.
        assert added == pytest.approx(expected * (1 + 2.0 ** (-weeks / 2)), abs=0.05)


@pytest.mark.parametrize("lag", [0, 100])
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_share_is_kept_whatever_the_lag(share: float, lag: int) -> None:
    """The lag is the number of decisions that others store between a worker's reading of the facts and storing of its own."""
    chance = np.random.default_rng(0)
    tasks = chance.normal(size=(400, 32))
    facts, waiting, outcomes = MemoryFacts(lambda: 1_000), deque[Fact](), list[bool]()
    gate = Gate(facts, 32, BOUNDS, GatePolicy(share))
    for number in range(1_800):
        gate.catch_up()
        vector = tasks[chance.integers(400)] + 0.6 * chance.normal(size=32)
        batch = gate.weigh([(str(number), "code", (vector / np.linalg.norm(vector)).astype(np.float32))])
        success = bool(chance.random() < 0.7)
        weighed = batch.weigh(0, success, 1.0)
        outcomes.append(success and weighed.adds >= weighed.bar)
        waiting.append(batch.settle(0, is_eligible=success, is_kept=outcomes[-1]))
        if len(waiting) > lag:
            facts.append("", "code", waiting.popleft().packed())
    assert 0.65 * share < np.mean(outcomes[600:]) < 1.4 * share


def test_damaged_facts_count_as_missing() -> None:
    fleet = Fleet(GatePolicy(share=0.1))
    intact = Fact("kp:trace:0", "code", Place(0, 0), 0.0, 0.0, 1_000, 0, True, EAST)
    of_other_dimensions = intact._replace(vector=EAST[:2])
    fleet.stored = [StoredFact(Place(1, 0)), StoredFact(Place(2, 0), of_other_dimensions), StoredFact(Place(3, 0), intact)]
    gate = fleet.gate()
    gate.catch_up()
    assert gate.kept_count == 1
    place, fields = entry_of(StoredFact(Place(3, 0), intact))
    damaged: list[Fact | bytes] = [
        intact._replace(cover=math.nan),
        intact._replace(adds=math.inf),
        *(intact._replace(kept_ttl_ms=each) for each in (-1, 0)),
        *(b"", b"[]", fields[5] + b"\0"),
    ]
    packed = [each if isinstance(each, bytes) else each.packed() for each in damaged]
    entries = Entries([(place, fields), *((place, [*fields[:5], each]) for each in packed), (place, fields)])
    assert [each.fact and each.fact.trace_id for each in entries] == ["kp:trace:0", *[None] * len(damaged), "kp:trace:0"]


class Step(NamedTuple):
    """A turn of one worker: it may start anew and read facts, and then decides some traces.

    Before the turn a fact may be erased and traces revised; between reading and deciding, more traces may be revised.
    """

    worker: int
    starts: bool
    reads: bool
    traces: list[tuple[str, Vectors, bool]]
    erases: int | None
    revises: list[int]
    revises_later: list[int]


VECTORS: Final = (
    st.lists(st.integers(-2, 2), min_size=3, max_size=3)
    .filter(any)
    .map(lambda row: np.array(row, np.float32) / np.float32(np.linalg.norm(row)))
)
STEPS: Final = st.builds(
    Step,
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["code", "law"]), VECTORS, st.booleans()), min_size=1, max_size=4),
    st.none() | st.integers(0, 30),
    st.lists(st.integers(0, 30), max_size=2),
    st.lists(st.integers(0, 30), max_size=2),
)


@given(
    st.lists(STEPS, max_size=12),
    st.sampled_from([GatePolicy(0.3), GatePolicy(0.1, bar=0.7)]),
    st.booleans(),
    st.sampled_from([BOUNDS.kept_ttl_ms, 4_000]),
)
def test_gates_agree_in_whatever_steps_they_read_the_facts(
    steps: list[Step], policy: GatePolicy, is_small: bool, kept_ttl_ms: int
) -> None:
    fleet = Fleet(policy, GateBounds(1_000, kept_ttl_ms, most_facts=8 if is_small else 1_000, most_runs=3))
    gates = [fleet.gate() for _ in range(3)]
    for step in steps:
        fleet.now_ms += 1_000
        if step.erases is not None and step.erases < len(fleet.stored) and fleet.stored[step.erases].fact:
            fleet.erase(fleet.stored[step.erases].place)
        fleet.revise_among(step.revises)
        if step.starts:
            gates[step.worker] = fleet.gate()
        if step.reads:
            gates[step.worker].catch_up()
        fleet.revise_among(step.revises_later)
        fleet.decide(gates[step.worker], step.traces)
    for gate in gates:
        gate.catch_up()
    assert same_is_known(gates[0], gates[1])
    assert same_is_known(gates[1], gates[2])
    counts = fleet.audit()
    has_erased = any(step.erases is not None for step in steps)
    assert is_small or has_erased or counts == {"agreeing": len(fleet.decisions), "beyond": 0, "undecided": 0}


def test_an_audit_ages_by_the_lifetime_that_was_set_when_a_trace_was_decided() -> None:
    fleet = Fleet(GatePolicy(share=0.1, bar=0.5))
    for kept_ttl_ms in (100_000, 10_000):
        fleet.bounds = BOUNDS._replace(kept_ttl_ms=kept_ttl_ms)
        for vector in (EAST, NORTH, EAST):
            fleet.now_ms += 4_000
            one_at_a_time(fleet, (vector, True))
    assert fleet.audit() == {"agreeing": 6, "beyond": 0, "undecided": 0}
    fleet.bounds = BOUNDS
    assert fleet.audit() == {"agreeing": 6, "beyond": 0, "undecided": 0}


@pytest.mark.parametrize("weeks", [3, 9])
def test_the_first_decisions_of_a_space_age_like_all_others(weeks: int) -> None:
    fleet = Fleet(GatePolicy(share=0.1, bar=0.5))
    early = fleet.gate()
    fleet.decide(early, [("code", EAST, True), ("code", EAST, True)])
    early.catch_up()
    fleet.now_ms += weeks * WEEK_MS
    fleet.decide(early, [("code", UP, True)])
    late = fleet.gate()
    for gate in (early, late):
        gate.catch_up()
    assert same_is_known(early, late)
    fleet.decide(early, [("code", EAST, True)])
    fleet.decide(late, [("code", EAST, True)])
    assert fleet.audit() == {"agreeing": 5, "beyond": 0, "undecided": 0}


def test_the_oldest_kept_traces_make_room_for_the_newest() -> None:
    fleet = Fleet(GatePolicy(share=0.1, bar=0.5), BOUNDS._replace(kept_elements=2))
    one_at_a_time(fleet, (EAST, True), (NORTH, True), (UP, True))
    gate = fleet.gate()
    gate.catch_up()
    assert gate.kept_count == 2
    assert gate.weigh([("kp:trace:again", "code", UP)]).weigh(0, True, 1.0).adds == pytest.approx(0, abs=1e-3)
    assert gate.weigh([("kp:trace:again", "code", EAST)]).weigh(0, True, 1.0).nearest is None


def test_a_late_failure_no_longer_covers_and_a_late_success_does() -> None:
    fleet = Fleet(GatePolicy(share=0.1, bar=0.5))
    gate = fleet.gate()
    assert one_at_a_time(fleet, (EAST, True), (NORTH, False), (EAST, True), (NORTH, True)) == [True, False, False, True]
    gate.catch_up()
    for number in (0, 1):
        fleet.revise(f"kp:trace:{number}")
    gate.catch_up()
    assert gate.kept_count == 2
    # To the north two traces are kept now. To the east the earlier runs stay covered.
    east, north = (fleet.decide(gate, [("code", vector, True)])[0] for vector in (EAST, NORTH))
    assert [east.adds, north.adds] == pytest.approx([1, 0], abs=1e-3)
    assert [each.nearest and each.nearest.trace_id for each in (east, north)] == [None, "kp:trace:1"]
    assert fleet.audit() == {"agreeing": 6, "beyond": 0, "undecided": 0}


def test_notes_make_room_like_kept_traces() -> None:
    fleet = Fleet(GatePolicy(share=0.1, bar=0.5), BOUNDS._replace(kept_elements=3))
    gate = fleet.gate()
    one_at_a_time(fleet, (EAST, True), (NORTH, True))
    gate.catch_up()
    fleet.revise("kp:trace:0")
    for vector, count in ((UP, 2), (-EAST, 2), (-NORTH, 3)):
        one_at_a_time(fleet, (vector, True))
        gate.catch_up()
        assert gate.kept_count == count
        anew = fleet.gate()
        anew.catch_up()
        assert same_is_known(gate, anew)


@given(st.lists(STEPS, min_size=1, max_size=5), st.data())
def test_an_audit_notices_figures_that_do_not_follow_from_the_facts(steps: list[Step], data: st.DataObject) -> None:
    fleet = Fleet(GatePolicy(0.3))
    gate = fleet.gate()
    for step in steps:
        gate.catch_up()
        fleet.decide(gate, step.traces)
    trace_id = data.draw(st.sampled_from(sorted(fleet.decisions)))
    verdict = fleet.decisions[trace_id].gate
    assert verdict
    changes: list[Callable[[], dict[str, object]]] = [
        lambda: {"gate": verdict.model_copy(update={"adds": verdict.adds + 0.1})},
        lambda: {"gate": verdict.model_copy(update={"bar": verdict.bar + 0.1})},
        lambda: {"outcome": "rejected" if verdict.accepts else "accepted"},
    ]
    fleet.decisions[trace_id] = fleet.decisions[trace_id].model_copy(update=data.draw(st.sampled_from(changes))())
    with pytest.raises(AssertionError):
        fleet.audit()
