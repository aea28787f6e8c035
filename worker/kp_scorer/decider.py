"""Decide one batch of traces: the only place where scoring, embedding, novelty and the ledger meet."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from kp_scorer.decision import Decision, Nearest, Novelty, Timings
from kp_scorer.embedding import CheckedEmbedder, Embedder, Vector
from kp_scorer.errors import ServiceUnavailable, TraceConflict, TraceDead, TraceHeld
from kp_scorer.novelty import Candidate, NoveltyCache, NoveltyLog, Placed, Window
from kp_scorer.scoring import Policy, decide_again, fingerprint, novelty_of, score
from kp_scorer.store import Committed, Death, Identity, Ledger, Record, Refusal, Standing, Tally, Verdict
from kp_scorer.trace import ReasoningTrace

Settled = Decision | TraceConflict | TraceDead | TraceHeld
"""What becomes of a trace: a decision, why there will be none, or that another worker is deciding it."""


class NoveltyMeter:
    """The embedder and the cache its vectors go to; there is never one without the other."""

    def __init__(self, embedder: Embedder, log: NoveltyLog, window: Window) -> None:
        """Compare by the vectors that ``embedder`` gives, in the log of its space."""
        self.embedder = embedder
        self.cache = NoveltyCache(log, window, embedder.dimensions)
        self._checked = CheckedEmbedder(embedder)

    def embed(self, traces: Sequence[ReasoningTrace], *, alone: bool) -> list[Vector]:
        """Embed traces, in order; a text that comes several times is embedded once. ``alone`` is one of a batch that failed.

        Raises:
            EmbedderSick: the embedder fails whatever it is given. Any other error is the fault of the traces.
        """
        rows: dict[str, int] = {}
        order = [rows.setdefault(self.embedder.recipe.text(trace), len(rows)) for trace in traces]
        vectors = self._checked.embed(list(rows), again=alone)
        return [vectors[row] for row in order]

    def place(self, candidates: Sequence[Candidate]) -> list[Novelty | None]:
        """Place candidates in the log and say how new each is; None if its id was taken by another digest.

        Raises:
            ServiceUnavailable: the log cannot be reached; placing again is safe.
        """
        return [self._explain(placed) if placed else None for placed in self.cache.place(candidates)]

    def _explain(self, placed: Placed) -> Novelty:
        nearest = placed.nearest
        return Novelty(
            source="embedding" if nearest else "empty_cache",
            nearest=Nearest(trace_id=nearest.trace_id, similarity=nearest.similarity) if nearest else None,
            duplicate_of=nearest.trace_id if nearest and nearest.is_duplicate else None,
            embedder=self.embedder.name,
            space=self.embedder.space,
            entry=str(placed.place),
        )


@dataclass(slots=True)
class Case:
    """A trace on its way to what becomes of it."""

    trace: ReasoningTrace
    identity: Identity
    is_begun: bool = False
    """Whether this batch decides it."""
    vector: Vector | None = None
    """Of its text, once embedded; stays None without an embedder."""
    settled: Settled | None = None
    """What became of it; None for one that is to be prepared again, alone."""


class Prepared(NamedTuple):
    """A batch between the two stages of deciding it."""

    cases: list[Case]
    look_up_ms: float
    embed_ms: float

    @property
    def begun(self) -> list[Case]:
        """Those that this batch decides."""
        return [case for case in self.cases if case.is_begun]


class Decider:
    """Turns traces into decisions, a batch at a time and three round trips a batch.

    One thread owns the first stage, and the embedder with it; one, which may be another, the second, and the cache with it.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        novelty: NoveltyMeter | None,
        max_attempts: int,
        shadow: Policy | None = None,
    ) -> None:
        """Decide by ``policy``; without ``novelty`` every trace's novelty is unknown.

        A trace that ``max_attempts`` workers began and did not live to end is dead: it must be what ended them. What ``shadow``
        would have made of a decision is counted along with it.
        """
        self._ledger = ledger
        self._policy = policy
        self._novelty = novelty
        self._max_attempts = max_attempts
        self._shadow = shadow
        # Of both: neither may change while they are compared.
        self._comparison = fingerprint(policy, shadow) if shadow else ""

    def decide(self, traces: Sequence[ReasoningTrace]) -> list[Settled]:
        """Decide the traces, in order. Deciding again is safe: a decided trace keeps its decision.

        Returns:
            For each trace the decision that stands; or the conflict if its id was taken by another digest; or that it is dead,
            because it is so in the ledger or because of too many attempts.

        Raises:
            ServiceUnavailable: Redis cannot be reached; nothing was lost, decide again later.
            EmbedderSick: the embedder fails whatever it is given; nothing was lost, decide in another process.
        """
        settled = self.finish(self.prepare(traces))
        for index, trace in enumerate(traces):
            while settled[index] is None:
                (settled[index],) = self.finish(self.prepare([trace], alone=True))
        return [one for one in settled if one is not None]

    def prepare(self, traces: Sequence[ReasoningTrace], *, alone: bool = False) -> Prepared:
        """Look traces up and embed those that are new: the first stage of deciding them.

        A trace whose worker has ended before is left out, unless it is prepared ``alone``: if it is what ended the worker, it
        takes no other trace along.

        Raises:
            ServiceUnavailable: Redis cannot be reached; nothing was lost.
            EmbedderSick: the embedder fails whatever it is given; nothing was lost.
        """
        cases = [Case(trace, Identity(trace.id, trace.digest())) for trace in traces]
        timer = _LapTimer()
        records = self._ledger.begin([case.identity for case in cases], alone=alone)
        look_up_ms = timer.lap_ms()
        for case, record in zip(cases, records, strict=True):
            case.settled = self._known(case.identity, record)
            case.is_begun = case.settled is None and (alone or not record.attempts)
        begun = [case for case in cases if case.is_begun]
        if begun and self._novelty:
            with self._releasing(begun):
                vectors = self._novelty.embed([case.trace for case in begun], alone=alone)
            for case, vector in zip(begun, vectors, strict=True):
                case.vector = vector
        return Prepared(cases, look_up_ms, embed_ms=timer.lap_ms())

    def finish(self, prepared: Prepared) -> list[Settled | None]:
        """Place, judge and commit what was prepared: the second stage. None for a trace that was left out.

        Raises:
            ServiceUnavailable: Redis cannot be reached; nothing was lost.
        """
        if begun := prepared.begun:
            with self._releasing(begun):
                self._decide(begun, prepared)
        return [case.settled for case in prepared.cases]

    def refresh(self) -> None:
        """Bring the mirror up to date while there is nothing to decide.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        if self._novelty:
            self._novelty.cache.catch_up()

    @contextmanager
    def _releasing(self, begun: Sequence[Case]) -> Iterator[None]:
        """Hold traces no longer if deciding them ends in an error: this worker lives and may not meet them again."""
        try:
            yield
        except Exception:
            # If this cannot be noted, another worker waits until the lease is over.
            with suppress(ServiceUnavailable):
                self._ledger.release([case.trace.id for case in begun])
            raise

    def _known(self, identity: Identity, record: Record) -> Settled | None:
        """What a trace's record settles; None if it is to be decided."""
        if record.digest != identity.digest:
            return TraceConflict(identity.trace_id)
        if record.reason is not None:
            return TraceDead(identity.trace_id, record.reason, record.detail)
        if record.decision:
            return Decision.model_validate_json(record.decision)
        if record.is_held:
            return TraceHeld(identity.trace_id)
        if record.attempts >= self._max_attempts:
            return TraceDead(identity.trace_id, "poison", f"{record.attempts} attempts to decide it came to no end")
        return None

    def _decide(self, begun: Sequence[Case], prepared: Prepared) -> None:
        timer = _LapTimer()
        novelties = self._place(begun)
        timings = Timings(
            look_up_ms=prepared.look_up_ms, embed_ms=prepared.embed_ms, place_ms=timer.lap_ms(), batch_size=len(begun)
        )
        judged: list[tuple[Case, Decision]] = []
        for case, novelty in zip(begun, novelties, strict=True):
            if novelty is None:
                case.settled = TraceConflict(case.trace.id)
            else:
                judged.append((case, self._judge(case.trace, novelty, timings)))
        self._commit(judged)

    def _place(self, begun: Sequence[Case]) -> Sequence[Novelty | None]:
        if self._novelty is None:
            return [Novelty(source="no_embedder") for _ in begun]
        return self._novelty.place([Candidate(*case.identity, case.vector) for case in begun if case.vector is not None])

    def _commit(self, judged: Sequence[tuple[Case, Decision]]) -> None:
        verdicts = [
            Verdict(*case.identity, decision.model_dump_json().encode(), decision.novelty.entry or "", self._tally(decision))
            for case, decision in judged
        ]
        for (case, own), committed in zip(judged, self._ledger.commit(verdicts, self._comparison), strict=True):
            case.settled = self._ended(case.trace.id, own, committed)

    def _tally(self, decision: Decision) -> Tally:
        is_known = self._policy.knows(decision.domain)
        if self._shadow is None:
            return Tally(decision.domain, is_known)
        again = decide_again(decision, self._shadow)
        return Tally(decision.domain, is_known, f"{decision.outcome}>{again.outcome}")

    @staticmethod
    def _ended(trace_id: str, own: Decision, committed: Committed) -> Settled | None:
        """What a commit settles; None if the trace is to be decided again."""
        match committed:
            case Standing(decision, is_own):
                return own if is_own else Decision.model_validate_json(decision)
            case Death(reason, detail):
                return TraceDead(trace_id, reason, detail)
            case Refusal.CONFLICT:
                return TraceConflict(trace_id)
            case Refusal.AGAIN:
                return None

    def _judge(self, trace: ReasoningTrace, novelty: Novelty, timings: Timings) -> Decision:
        scored = score(trace, novelty_of(novelty.nearest.similarity if novelty.nearest else None), self._policy)
        domain = trace.metadata.task_domain
        bounds = self._policy.bounds(domain, trace.metadata.quality_threshold)
        return Decision(
            trace_id=trace.id,
            domain=domain,
            taken_for=self._policy.aliases.get(domain),
            outcome=bounds.outcome(scored.value),
            score=scored.value,
            threshold=bounds.threshold,
            threshold_source=bounds.source,
            review=bounds.review,
            dimensions=scored.dimensions,
            profile=scored.profile,
            weights=scored.weights,
            composite=scored.composite,
            overrides=scored.overrides,
            novelty=novelty,
            timings=timings,
            decided_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )


class _LapTimer:
    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap_ms(self) -> float:
        now = time.perf_counter()
        lap, self._since = now - self._since, now
        return round(lap * 1_000, 3)
