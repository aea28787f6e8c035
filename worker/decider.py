"""Decide one batch of traces: the only place where scoring, embedding, novelty and the ledger meet."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import NamedTuple

from worker.decision import Decision, Nearest, Novelty, Timings
from worker.embedding import Embedder
from worker.embedding.embedder import Vectors
from worker.errors import ServiceUnavailable, TraceConflict, TraceDead
from worker.ledger import Ledger, Opening, Record, Verdict
from worker.novelty import Candidate, NoveltyCache
from worker.novelty.cache import Placed
from worker.scoring import Policy, novelty_of, score
from worker.trace import ReasoningTrace

Settled = Decision | TraceConflict | TraceDead
"""What becomes of a trace: a decision, or why there will be none."""


class NoveltyStage(NamedTuple):
    """The embedder and the cache its vectors go to; there is never one without the other."""

    embedder: Embedder
    cache: NoveltyCache


class _Submission(NamedTuple):
    trace: ReasoningTrace
    opening: Opening


class Prepared(NamedTuple):
    """A batch between the two stages of deciding it."""

    batch: list[_Submission]
    settled: dict[int, Settled]
    """What became, by its place in the batch, of each trace that needs no deciding."""
    new: list[int]
    """The places of those to be decided."""
    vectors: Vectors | None
    """Their vectors, in the same order; None without an embedder."""
    look_up_ms: float
    embed_ms: float


class Decider:
    """Turns traces into decisions, a batch at a time and three round trips a batch.

    One thread owns the first stage, and the embedder with it; one, which may be another, the second, and the cache with it.
    """

    def __init__(self, ledger: Ledger, policy: Policy, novelty: NoveltyStage | None, max_attempts: int = 5) -> None:
        """Decide by ``policy``; without ``novelty`` every trace's novelty is unknown.

        A trace that was begun ``max_attempts`` times and never came to an end is dead: it must have ended its workers.
        """
        self._ledger = ledger
        self._policy = policy
        self._novelty = novelty
        self._max_attempts = max_attempts

    def decide(self, traces: Sequence[ReasoningTrace]) -> list[Settled]:
        """Decide the traces, in order. Deciding again is safe: a decided trace keeps its decision.

        Returns:
            For each trace the decision that stands; or the conflict if its id was taken by other content; or that it is dead,
            because it is so in the ledger or because of too many attempts.

        Raises:
            ServiceUnavailable: Redis cannot be reached; nothing was lost, decide again later.
        """
        settled = self.finish(self.prepare(traces))
        for index, trace in enumerate(traces):
            if settled[index] is None:
                (settled[index],) = self.finish(self.prepare([trace], alone=True))
        return [one for one in settled if one is not None]

    def prepare(self, traces: Sequence[ReasoningTrace], *, alone: bool = False) -> Prepared:
        """Look traces up and embed those that are new: the first stage of deciding them.

        A trace that a worker began before and did not end is left out, unless it is prepared ``alone``: if it is what ended
        the worker, it takes no other trace along.

        Raises:
            ServiceUnavailable: Redis cannot be reached; nothing was lost.
        """
        batch = [_Submission(trace, Opening(trace.id, trace.content_digest())) for trace in traces]
        clock = _Stopwatch()
        records = self._ledger.begin([submission.opening for submission in batch], alone=alone)
        look_up_ms = clock.lap_ms()
        settled = {
            index: known
            for index, (submission, record) in enumerate(zip(batch, records, strict=True))
            if (known := self._known(submission, record)) is not None
        }
        new = [index for index, record in enumerate(records) if index not in settled and (alone or not record.attempts)]
        with self._absolving(batch, new):
            vectors = self._embed([batch[index] for index in new]) if new else None
        return Prepared(batch, settled, new, vectors, look_up_ms, embed_ms=clock.lap_ms())

    def finish(self, prepared: Prepared) -> list[Settled | None]:
        """Place, judge and commit what was prepared: the second stage. None for a trace that was left out.

        Raises:
            ServiceUnavailable: Redis cannot be reached; nothing was lost.
        """
        settled = dict(prepared.settled)
        if prepared.new:
            with self._absolving(prepared.batch, prepared.new):
                settled |= zip(prepared.new, self._decide_new(prepared), strict=True)
        return [settled.get(index) for index in range(len(prepared.batch))]

    @contextmanager
    def _absolving(self, batch: Sequence[_Submission], new: Sequence[int]) -> Iterator[None]:
        """Take back the attempts of traces if they end in an error: no worker died of them."""
        try:
            yield
        except Exception:
            # If this cannot be noted, they are charged an attempt too many.
            with suppress(ServiceUnavailable):
                self._ledger.absolve([batch[index].trace.id for index in new])
            raise

    def _known(self, submission: _Submission, record: Record) -> Settled | None:
        """What a trace's record settles; None if it is to be decided."""
        trace_id, content = submission.opening
        if record.content != content:
            return TraceConflict(trace_id)
        if record.state == "dead":
            return TraceDead(trace_id, record.reason)
        if record.decision:
            return Decision.model_validate_json(record.decision)
        if record.attempts >= self._max_attempts:
            return TraceDead(trace_id, f"poison: {record.attempts} attempts to decide it came to no end")
        return None

    def refresh(self) -> None:
        """Bring the mirror up to date while there is nothing to decide.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        if self._novelty:
            self._novelty.cache.catch_up()

    def _decide_new(self, prepared: Prepared) -> list[Settled]:
        clock = _Stopwatch()
        batch = [prepared.batch[index] for index in prepared.new]
        novelties = self._place(batch, prepared.vectors)
        timings = Timings(
            look_up_ms=prepared.look_up_ms, embed_ms=prepared.embed_ms, place_ms=clock.lap_ms(), batch_size=len(batch)
        )
        decided = {
            index: self._judge(trace, novelty, timings)
            for index, ((trace, _), novelty) in enumerate(zip(batch, novelties, strict=True))
            if novelty is not None
        }
        verdicts = [Verdict(*batch[index].opening, decision.model_dump_json().encode()) for index, decision in decided.items()]
        results: list[Settled] = [TraceConflict(trace.id) for trace, _ in batch]
        for (index, own), verdict, stands in zip(decided.items(), verdicts, self._ledger.commit(verdicts), strict=True):
            if stands is not None:
                results[index] = own if stands is verdict.decision else Decision.model_validate_json(stands)
        return results

    def _embed(self, batch: Sequence[_Submission]) -> Vectors | None:
        if self._novelty is None:
            return None
        # The same text twice in a batch is embedded once.
        rows: dict[str, int] = {}
        order = [rows.setdefault(trace.embedding_text, len(rows)) for trace, _ in batch]
        return self._novelty.embedder.embed(list(rows))[order]

    def _place(self, batch: Sequence[_Submission], vectors: Vectors | None) -> list[Novelty | None]:
        if self._novelty is None or vectors is None:
            return [Novelty(source="no_embedder") for _ in batch]
        candidates = [Candidate(*opening, vector) for (_, opening), vector in zip(batch, vectors, strict=True)]
        embedder, cache = self._novelty
        return [self._explain(placed, embedder) if placed else None for placed in cache.place(candidates)]

    @staticmethod
    def _explain(placed: Placed, embedder: Embedder) -> Novelty:
        nearest = placed.nearest
        return Novelty(
            source="embedding" if nearest else "empty_cache",
            nearest=Nearest(trace_id=nearest.trace_id, similarity=nearest.similarity) if nearest else None,
            duplicate_of=nearest.trace_id if nearest and nearest.is_duplicate else None,
            embedder=embedder.name,
            space=embedder.space,
            entry=str(placed.place),
        )

    def _judge(self, trace: ReasoningTrace, novelty: Novelty, timings: Timings) -> Decision:
        scored = score(trace, novelty_of(novelty.nearest.similarity if novelty.nearest else None), self._policy)
        domain = trace.metadata.task_domain
        threshold, threshold_source = self._policy.threshold_for(domain)
        return Decision(
            trace_id=trace.id,
            domain=domain,
            outcome="accepted" if scored.value >= threshold else "rejected",
            score=scored.value,
            threshold=threshold,
            threshold_source=threshold_source,
            dimensions=scored.dimensions,
            profile=scored.profile,
            weights=scored.weights,
            composite=scored.composite,
            overrides=scored.overrides,
            novelty=novelty,
            timings=timings,
            decided_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )


class _Stopwatch:
    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap_ms(self) -> float:
        now = time.perf_counter()
        lap, self._since = now - self._since, now
        return round(lap * 1_000, 3)
