"""Decide one batch of traces: the only place where scoring, embedding, novelty and the ledger meet."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from kp_scorer.decision import Decision, Nearest, Novelty, Timings
from kp_scorer.embedding import CheckedEmbedder, Embedder, Vector
from kp_scorer.errors import ServiceUnavailable, TraceConflict, TraceDead, TraceHeld
from kp_scorer.ledger import Identity, Ledger, Record, Tally, Verdict
from kp_scorer.novelty import Candidate, NoveltyCache, NoveltyLog, Placement, Window
from kp_scorer.scoring import Policy, novelty_of, score
from kp_scorer.trace import ReasoningTrace

_NAME_CHARS: Final = 200

Resolved = Decision | TraceConflict | TraceDead | TraceHeld
"""How a trace is resolved: a decision, why there will be none, or that another worker is deciding it."""


class NoveltyMeter:
    """The embedder and the cache its vectors go to, by the log of its space; there is never one without the other."""

    def __init__(self, embedder: Embedder, log: NoveltyLog, window: Window) -> None:
        self.embedder = embedder
        self.cache = NoveltyCache(log, window, embedder.dimensions)
        self._checked = CheckedEmbedder(embedder)

    def embed(self, traces: Sequence[ReasoningTrace], *, alone: bool) -> list[Vector]:
        """Embed traces, in order, and equal texts once; ``alone`` is a trace of a batch that failed.

        Raises:
            EmbedderUnhealthy: the embedder fails whatever it is given. Any other error is the fault of the traces.
        """
        rows: dict[str, int] = {}
        order = [rows.setdefault(self.embedder.recipe.text(trace), len(rows)) for trace in traces]
        vectors = self._checked.embed(list(rows), retry=alone)
        return [vectors[row] for row in order]

    def place(self, candidates: Sequence[Candidate]) -> list[Novelty | None]:
        """Place candidates in the log, which is idempotent, and compute how new each is; None if another digest has its id."""
        return [self._novelty(placement) if placement else None for placement in self.cache.place(candidates)]

    def _novelty(self, placement: Placement) -> Novelty:
        nearest = placement.nearest
        return Novelty(
            source="embedding" if nearest else "empty_cache",
            nearest=Nearest(trace_id=nearest.trace_id, similarity=nearest.similarity) if nearest else None,
            duplicate_of=nearest.trace_id if nearest and nearest.is_duplicate else None,
            embedder=self.embedder.name,
            space=self.embedder.space,
            entry=str(placement.place),
        )


@dataclass(slots=True)
class Case:
    """A trace in flight, until it is resolved."""

    trace: ReasoningTrace
    identity: Identity
    is_claimed: bool = False
    """Whether this batch decides it."""
    vector: Vector | None = None
    resolved: Resolved | None = None
    """None for a trace that is to be prepared again, alone."""


class Prepared(NamedTuple):
    """A batch between the two stages of deciding it."""

    cases: list[Case]
    look_up_ms: float
    embed_ms: float

    @property
    def claimed(self) -> list[Case]:
        """The traces that this batch decides."""
        return [case for case in self.cases if case.is_claimed]


class Decider:
    """Turns traces into decisions, a batch at a time and three round trips a batch.

    One thread owns the first stage, and the embedder with it; one, which may be another, the second, and the cache with it.
    """

    def __init__(
        self, ledger: Ledger, policy: Policy, novelty: NoveltyMeter | None, max_attempts: int, *, names_nearest: bool = True
    ) -> None:
        """Decide by ``policy``; without ``novelty`` every trace's novelty is unknown.

        A trace that ``max_attempts`` workers began and did not live to end is dead: it must be what ended them. Decisions name
        the nearest earlier trace if ``names_nearest``.
        """
        self._ledger = ledger
        self._policy = policy
        self._novelty = novelty
        self._max_attempts = max_attempts
        self._names_nearest = names_nearest

    @property
    def tokens_embedded(self) -> int:
        """How many tokens were embedded so far; 0 for ever where none are counted."""
        return self._novelty.embedder.tokens_embedded if self._novelty else 0

    def decide(self, traces: Sequence[ReasoningTrace]) -> list[Resolved]:
        """Decide the traces, in order. Deciding again is idempotent: a decided trace keeps its decision.

        Raises:
            ServiceUnavailable: Redis cannot be reached; nothing was lost, decide again later.
            EmbedderUnhealthy: the embedder fails whatever it is given; nothing was lost, decide in another process.
        """
        results = self.finish(self.prepare(traces))
        for index, trace in enumerate(traces):
            while results[index] is None:
                (results[index],) = self.finish(self.prepare([trace], alone=True))
        return [resolved for resolved in results if resolved is not None]

    def prepare(self, traces: Sequence[ReasoningTrace], *, alone: bool = False) -> Prepared:
        """Look traces up and embed those that are new: the first stage of deciding them.

        A trace whose worker has ended before is left out, unless it is prepared ``alone``: if it is what ended the worker, no
        other trace fails with it. Raises the errors of :meth:`decide`.
        """
        cases = [Case(trace, Identity(trace.id, trace.digest())) for trace in traces]
        started = time.perf_counter()
        records = self._ledger.acquire([case.identity for case in cases], alone=alone)
        look_up_ms, started = _ms_since(started), time.perf_counter()
        for case, record in zip(cases, records, strict=True):
            case.resolved = self._by_record(case.identity, record)
            case.is_claimed = case.resolved is None and (alone or not record.attempts)
        claimed = [case for case in cases if case.is_claimed]
        if claimed and self._novelty:
            with self._releasing(claimed):
                vectors = self._novelty.embed([case.trace for case in claimed], alone=alone)
            for case, vector in zip(claimed, vectors, strict=True):
                case.vector = vector
        return Prepared(cases, look_up_ms, embed_ms=_ms_since(started))

    def finish(self, prepared: Prepared) -> list[Resolved | None]:
        """Place, judge and commit what was prepared: the second stage. None for a trace that was left out."""
        if claimed := prepared.claimed:
            with self._releasing(claimed):
                self._decide(claimed, prepared)
        return [case.resolved for case in prepared.cases]

    def refresh(self) -> None:
        """Bring the mirror up to date while there is nothing to decide."""
        if self._novelty:
            self._novelty.cache.catch_up()

    @contextmanager
    def _releasing(self, claimed: Sequence[Case]) -> Iterator[None]:
        """Release traces if deciding them ends in an error: this worker lives and may not receive them again."""
        try:
            yield
        except Exception:
            # If this fails, another worker waits until the lease expires.
            with suppress(ServiceUnavailable):
                self._ledger.release([case.trace.id for case in claimed])
            raise

    def _by_record(self, identity: Identity, record: Record) -> Resolved | None:
        """How a trace's record resolves it; None if it is to be decided."""
        # First, as a damaged record may have any digest.
        if record.reason is not None:
            return TraceDead(identity.trace_id, record.reason, record.detail)
        if record.digest != identity.digest:
            return TraceConflict(identity.trace_id)
        if record.decision:
            return record.decision
        if record.is_held:
            return TraceHeld(identity.trace_id)
        if record.attempts >= self._max_attempts:
            return TraceDead(identity.trace_id, "poison", f"{record.attempts} attempts to decide it came to no end")
        return None

    def _decide(self, claimed: Sequence[Case], prepared: Prepared) -> None:
        started = time.perf_counter()
        novelties: Sequence[Novelty | None] = [Novelty(source="no_embedder")] * len(claimed)
        if self._novelty:
            candidates = [Candidate(*case.identity, case.vector) for case in claimed if case.vector is not None]
            novelties = self._novelty.place(candidates)
        timings = Timings(
            look_up_ms=prepared.look_up_ms, embed_ms=prepared.embed_ms, place_ms=_ms_since(started), batch_size=len(claimed)
        )
        judged: list[tuple[Case, Decision]] = []
        for case, novelty in zip(claimed, novelties, strict=True):
            if novelty is None:
                case.resolved = TraceConflict(case.trace.id)
            else:
                judged.append((case, self._judge(case.trace, novelty, timings)))
        self._commit(judged)

    def _commit(self, judged: Sequence[tuple[Case, Decision]]) -> None:
        verdicts = [
            Verdict(
                *case.identity,
                decision.model_dump_json().encode(),
                decision.novelty.entry or "",
                Tally(
                    decision.domain,
                    self._policy.mentions(decision.domain),
                    " ".join(guard.name for guard in decision.guards if guard.fired),
                ),
            )
            for case, decision in judged
        ]
        for (case, own), committed in zip(judged, self._ledger.commit(verdicts), strict=True):
            match committed.outcome:
                case "stored":
                    case.resolved = own
                case "stands":
                    case.resolved = committed.decision
                case "dead" if committed.reason is not None:
                    case.resolved = TraceDead(case.trace.id, committed.reason, committed.detail)
                case "conflict":
                    case.resolved = TraceConflict(case.trace.id)
                case _:
                    # Decided again.
                    case.resolved = None

    def _judge(self, trace: ReasoningTrace, novelty: Novelty, timings: Timings) -> Decision:
        scored = score(trace, novelty_of(novelty.nearest.similarity if novelty.nearest else None), self._policy)
        domain = trace.metadata.task_domain
        bounds = self._policy.bounds(domain, trace.metadata.quality_threshold)
        guards = (
            *self._policy.guard_confidence(trace.outcome.confidence),
            *self._policy.guard_novelty(
                domain, scored.dimensions.novelty, novelty.source, is_copy=novelty.duplicate_of is not None
            ),
        )
        return Decision(
            trace_id=trace.id,
            domain=domain,
            agent_id=_short(trace.metadata.agent_id),
            framework=_short(trace.metadata.framework),
            visibility=trace.metadata.visibility,
            privacy_level=trace.metadata.privacy_level,
            taken_for=self._policy.aliases.get(domain),
            outcome=bounds.outcome(scored.value, guards),
            score=scored.value,
            threshold=bounds.threshold,
            threshold_source=bounds.source,
            review=bounds.review,
            dimensions=scored.dimensions,
            profile=scored.profile,
            weights=scored.weights,
            composite=scored.composite,
            overrides=scored.overrides,
            guards=guards,
            novelty=novelty if self._names_nearest else novelty.model_copy(update={"nearest": None, "duplicate_of": None}),
            timings=timings,
            decided_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )


def _short(name: str | None) -> str | None:
    """A name that a decision can carry: unread decisions and records are bounded by number."""
    return name if name is not None and len(name) <= _NAME_CHARS else None


def _ms_since(started: float) -> float:
    return round((time.perf_counter() - started) * 1_000, 3)
