"""The steps of deciding traces, which bring scoring, embedding, novelty and the ledger together."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final

from kp_scorer.checks.asking import Checks
from kp_scorer.decision import CheckResult, Decision, GateResult, Novelty, Pinned, Received, Stated, Timings
from kp_scorer.embedding.embedder import Counts, Embedder, Vector
from kp_scorer.errors import SettingsError, TraceConflict, TraceDead, TraceHeld
from kp_scorer.gate import Fact, FactLog, Gate
from kp_scorer.novelty.pins import NO_EMBEDDER, Pins
from kp_scorer.novelty_meter import Comparison, NoveltyMeter
from kp_scorer.scoring import Policy, novelty_of, recoveries, score
from kp_scorer.settings.sections import GateSettings, NoveltySettings, RoutingSettings
from kp_scorer.settings.settings import NO_VECTORS
from kp_scorer.store import Store
from kp_scorer.store.ledger import Ledger
from kp_scorer.store.records import Identity, Record, Verdict
from kp_scorer.trace import Digests, ReasoningTrace

_NAME_CHARS: Final = 200

Resolved = Decision | TraceConflict | TraceDead | TraceHeld  # TraceHeld: another worker is deciding the trace.


def open_pins(settings: NoveltySettings, store: Store | None, embedder: Embedder | None) -> Pins | None:
    """Open the pinned sets that the settings name, if any, without loading them; raise SettingsError without an embedder."""
    if not settings.pinned or not store:
        return None
    if embedder is None:
        raise SettingsError(NO_EMBEDDER)
    return Pins(store.pinned_sets(embedder.space), settings.limits, embedder.dimensions)


def open_gate(routing: RoutingSettings, gate: GateSettings, novelty: NoveltyMeter | None, facts: FactLog) -> Gate | None:
    """Make the coverage gate if the settings name it, without reading its facts; raise SettingsError without an embedder."""
    if routing.gate == "score":
        return None
    if novelty is None:
        raise SettingsError(NO_VECTORS)
    return Gate(facts, novelty.embedder.dimensions, gate.bounds, routing.policy)


@dataclass(slots=True)
class PendingDecision:
    """A trace on its way to a decision."""

    trace: ReasoningTrace
    digests: Digests
    is_claimed: bool = False  # True if this worker decides it.
    vector: Vector | None = None
    objective_vector: Vector | None = None  # None unless texts are pinned.
    tokens: Counts = field(default_factory=Counts)
    checks: tuple[CheckResult, ...] = ()
    resolved: Resolved | None = None  # None until it is resolved; it stays None if the trace is to be decided again, alone.
    received: Received | None = None
    times_ms: dict[str, float] = field(default_factory=dict)  # The duration of each step so far, named as in ``Timings``.

    @property
    def identity(self) -> Identity:
        """The id and digest by which the ledger knows the trace."""
        return Identity(self.trace.id, self.digests.content)


@dataclass
class Decider:
    """Turns traces into decisions in four steps: acquire, check, embed, finish.

    For all its traces together, ``acquire`` makes one round trip to Redis, and ``finish`` makes two, one more for pinned sets,
    and one more for the gate. Each step belongs to one thread, and that of ``finish`` owns the mirror, too.
    """

    ledger: Ledger
    policy: Policy
    novelty: NoveltyMeter | None  # Without it, every trace's novelty is unknown.
    max_attempts: int  # A trace is poison once this many workers have died or stalled while deciding it.
    _: KW_ONLY
    names_nearest: bool = True
    checks: Checks | None = None
    sample: float = 0.0  # The share of all traces, 0..1, that is sampled for review.
    gate: Gate | None = None  # Without a gate, the score decides.

    def decide(self, traces: Sequence[ReasoningTrace], *, alone: bool = False) -> list[Resolved]:
        """Decide traces in this thread, and return the results in their order.

        ``alone`` means that there is one trace, which failed before with others. Raises ServiceUnavailable if Redis cannot be
        reached, and EmbedderUnhealthy if another process has to decide. Nothing is lost: a decided trace keeps its decision.
        """
        decisions = self.acquire(traces, alone=alone)
        for pending in decisions:
            self.check(pending)
        self.embed(decisions, alone=alone)
        self.finish(decisions)
        return [pending.resolved or self.decide([pending.trace], alone=True)[0] for pending in decisions]

    def acquire(self, traces: Sequence[ReasoningTrace], *, alone: bool = False) -> list[PendingDecision]:
        """Look traces up, and lease those that are to be decided.

        A trace with attempts is leased only if it is acquired ``alone``: if it kills this worker, too, no other trace is
        charged with an attempt. Raises the errors of :meth:`decide`.
        """
        # The digest of the visible part takes a quarter of a millisecond for a long trace, and only the log needs it.
        decisions = [
            PendingDecision(trace, trace.digests() if self.novelty else Digests(trace.digest(), b"")) for trace in traces
        ]
        started = time.perf_counter()
        records = self.ledger.acquire([pending.identity for pending in decisions], alone=alone)
        look_up_ms = ms_since(started)
        for pending, record in zip(decisions, records, strict=True):
            pending.times_ms |= {"look_up_ms": look_up_ms, "embed_ms": 0.0}
            pending.resolved = resolved_by(pending.identity, record, self.max_attempts)
            pending.is_claimed = pending.resolved is None and (alone or not record.attempts)
        release_dead(self.ledger, (pending.resolved for pending in decisions))
        return decisions

    def check(self, pending: PendingDecision) -> None:
        """Run the checks on the trace, if it is claimed."""
        if self.checks and pending.is_claimed:
            pending.checks = self.checks.run(pending.trace)

    def embed(self, decisions: Sequence[PendingDecision], *, alone: bool = False) -> None:
        """Embed the claimed traces together. Raises the errors of :meth:`decide`."""
        claimed = [pending for pending in decisions if pending.is_claimed]
        if not claimed or not self.novelty:
            return
        started = time.perf_counter()
        with releasing(self.ledger, [pending.trace.id for pending in claimed]):
            embedded = self.novelty.embed([pending.trace for pending in claimed], alone=alone)
        for pending, (tokenized, vector, objective_vector) in zip(claimed, embedded, strict=True):
            pending.tokens, pending.vector, pending.objective_vector = tokenized.counts, vector, objective_vector
            pending.times_ms["embed_ms"] = ms_since(started)

    def finish(self, decisions: Sequence[PendingDecision]) -> None:
        """Place, judge and commit the claimed traces. This resolves all except those that are to be decided again, alone."""
        if claimed := [pending for pending in decisions if pending.is_claimed]:
            with releasing(self.ledger, [pending.trace.id for pending in claimed]):
                self._place_and_commit(claimed)

    def refresh(self) -> None:
        """Bring the mirror and the gate up to date while there is nothing to decide."""
        if self.novelty:
            self.novelty.cache.catch_up()
        if self.gate:
            self.gate.catch_up()

    def _place_and_commit(self, claimed: Sequence[PendingDecision]) -> None:
        started = time.perf_counter()
        comparisons: Sequence[Comparison | None] = [(Novelty(source="no_embedder"), ())] * len(claimed)
        if meter := self.novelty:
            comparisons = meter.place(
                [meter.candidate(each.trace, each.digests, each.vector) for each in claimed if each.vector is not None],
                [each.objective_vector for each in claimed],
            )
        place_ms = ms_since(started)
        admitted: list[tuple[PendingDecision, Comparison]] = []
        for pending, comparison in zip(claimed, comparisons, strict=True):
            if comparison:
                admitted.append((pending, comparison))
            else:
                pending.resolved = TraceConflict(pending.trace.id)
        batch = None
        if self.gate:
            self.gate.catch_up()
            vectors = [(each.trace, each.vector) for each, _ in admitted if each.vector is not None]
            batch = self.gate.weigh([(trace.id, trace.metadata.task_domain, vector) for trace, vector in vectors])
        judged: list[tuple[PendingDecision, Decision, Fact | None]] = []
        for index, (pending, (novelty, pinned)) in enumerate(admitted):
            timings = Timings(**pending.times_ms, place_ms=place_ms, batch_size=len(claimed))
            if self.novelty:
                novelty = self.novelty.with_counts(novelty, pending.tokens)
            decision = self._judge(pending, novelty, pinned, timings, partial(batch.weigh, index) if batch else None)
            fact = None
            if batch and decision.gate:
                could_be = decision.gate.eligible and not decision.is_guarded
                fact = batch.settle(index, is_eligible=could_be, is_kept=decision.outcome == "accepted")
            judged.append((pending, decision, fact))
        committed = self.ledger.commit([self._verdict(*each) for each in judged])
        for (pending, decision, _), result in zip(judged, committed, strict=True):
            if result != "again":
                pending.resolved = decision if result == "stored" else result

    def _verdict(self, pending: PendingDecision, decision: Decision, fact: Fact | None) -> Verdict:
        return Verdict(
            *pending.identity,
            decision.model_dump_json().encode(),
            decision.novelty.entry or "",
            decision.domain,
            decision.domain in self.policy.domains,
            " ".join(guard.name for guard in decision.guards if guard.fired),
            fact.packed() if fact else b"",
            is_kept=fact is not None and fact.is_kept,
            trace=pending.trace.model_dump_json(exclude_none=True).encode() if self.ledger.copies_traces else b"",
        )

    def _judge(
        self,
        pending: PendingDecision,
        novelty: Novelty,
        pinned: tuple[Pinned, ...],
        timings: Timings,
        weigh: Callable[[bool, float], GateResult] | None,
    ) -> Decision:
        trace = pending.trace
        scored = score(trace, novelty_of(novelty.nearest.similarity if novelty.nearest else None), self.policy)
        domain = trace.metadata.task_domain
        bounds = self.policy.bounds(domain, trace.metadata.quality_threshold)
        is_copy = novelty.duplicate_of is not None
        guards = (
            *self.policy.guard_confidence(trace.outcome.confidence),
            *self.policy.guard_novelty(domain, scored.dimensions.novelty, novelty.source, is_copy=is_copy),
        )
        gate = weigh(trace.metadata.success, scored.dimensions.outcome_confidence) if weigh else None
        demanded = [each.outcome for part in (pending.checks, pinned) for each in part]
        return Decision(
            trace_id=trace.id,
            domain=domain,
            agent_id=_short(trace.metadata.agent_id),
            framework=_short(trace.metadata.framework),
            visibility=trace.metadata.visibility,
            privacy_level=trace.metadata.privacy_level,
            taken_for=self.policy.aliases.get(domain),
            outcome=bounds.outcome(scored.score, guards, demanded, gate),
            **bounds._asdict(),
            **scored._asdict(),
            stated=Stated(success=trace.metadata.success, confidence=trace.outcome.confidence, recoveries=recoveries(trace)),
            guards=guards,
            checks=pending.checks,
            gate=gate if self.names_nearest else gate and gate.model_copy(update={"nearest": None}),
            # A producer could choose an id that is not sampled, but cannot choose the place in the log.
            sampled=self.sample if fraction_of(novelty.entry or trace.id) < self.sample else None,
            novelty=novelty if self.names_nearest else novelty.model_copy(update={"nearest": None, "duplicate_of": None}),
            pinned=pinned if self.names_nearest else tuple(each.model_copy(update={"nearest": None}) for each in pinned),
            received=pending.received,
            timings=timings,
            decided_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )


def release_dead(ledger: Ledger, ends: Iterable[object]) -> None:
    """Release those of some traces, or late outcomes, that end as dead letters."""
    if dead := [end.trace_id for end in ends if isinstance(end, TraceDead)]:
        # Dead letters end these without the ledger's knowledge. It would renew their leases for as long as this worker lives if
        # Redis went back to a state before the dead letters.
        ledger.release(dead)


@contextmanager
def releasing(ledger: Ledger, trace_ids: Sequence[str]) -> Iterator[None]:
    """Release leased traces, or late outcomes, if the body raises an error."""
    try:
        yield
    except Exception:
        ledger.release(trace_ids)
        raise


def resolved_by(identity: Identity, record: Record, max_attempts: int) -> Resolved | None:
    """Return how the record of a trace, or of a late outcome, resolves it; None if it is to be decided."""
    # This comes first, as a damaged record may have any digest.
    if record.reason is not None:
        return TraceDead(identity.trace_id, record.reason, record.detail)
    if record.digest != identity.digest:
        return TraceConflict(identity.trace_id)
    if record.decision:
        return record.decision
    if record.is_held:
        return TraceHeld(identity.trace_id)
    if record.attempts >= max_attempts:
        return TraceDead(identity.trace_id, "poison", f"{record.attempts} workers died or stalled while they decided it")
    return None


def fraction_of(text: str) -> float:
    """Map a text to a number in [0, 1), uniformly over all texts: its 6-byte BLAKE2b digest as a fraction."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def _short(name: str | None) -> str | None:
    """Return a name, or None if it is too long: unread decisions and records are limited in number, not in size."""
    return name if name is not None and len(name) <= _NAME_CHARS else None


def ms_since(started: float) -> float:
    """Return the milliseconds since a time of ``perf_counter``."""
    return round((time.perf_counter() - started) * 1_000, 3)
