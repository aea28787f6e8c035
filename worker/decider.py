"""Decide one batch of traces: the only place where scoring, embedding, novelty and the ledger meet."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from worker.decision import Decision, Nearest, Novelty, Timings
from worker.embedding import Embedder
from worker.embedding.embedder import Vectors
from worker.errors import TraceConflict
from worker.ledger import Ledger, Verdict
from worker.novelty import Candidate, NoveltyCache
from worker.novelty.cache import Placed
from worker.scoring import Policy, novelty_of, score
from worker.trace import ReasoningTrace


class NoveltyStage(NamedTuple):
    """The embedder and the cache its vectors go to; there is never one without the other."""

    embedder: Embedder
    cache: NoveltyCache


class _Submission(NamedTuple):
    trace: ReasoningTrace
    content: bytes


class Decider:
    """Turns traces into decisions, a batch at a time and three round trips a batch. One thread owns it."""

    def __init__(self, ledger: Ledger, policy: Policy, novelty: NoveltyStage | None) -> None:
        """Decide by ``policy``; without ``novelty`` every trace's novelty is unknown."""
        self._ledger = ledger
        self._policy = policy
        self._novelty = novelty

    def decide(self, traces: Sequence[ReasoningTrace]) -> list[Decision | TraceConflict]:
        """Decide the traces, in order. Deciding again is safe: a decided trace keeps its decision.

        Returns:
            For each trace the decision that stands, or the conflict if its id was taken by other content.

        Raises:
            ServiceUnavailable: Redis cannot be reached; nothing was lost, decide again later.
        """
        submissions = [_Submission(trace, trace.content_digest()) for trace in traces]
        standing: list[Decision | TraceConflict | None] = []
        clock = _Stopwatch()
        for submission, record in zip(submissions, self._ledger.look_up([trace.id for trace in traces]), strict=True):
            if record and record.content and record.content != submission.content:
                standing.append(TraceConflict(submission.trace.id))
            else:
                standing.append(Decision.model_validate_json(record.decision) if record and record.decision else None)
        look_up_ms = clock.lap_ms()
        undecided = [index for index, known in enumerate(standing) if known is None]
        if undecided:
            fresh = self._decide_new([submissions[index] for index in undecided], look_up_ms)
            for index, decision in zip(undecided, fresh, strict=True):
                standing[index] = decision
        return [known for known in standing if known is not None]

    def refresh(self) -> None:
        """Bring the mirror up to date while there is nothing to decide.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        if self._novelty:
            self._novelty.cache.catch_up()

    def _decide_new(self, batch: Sequence[_Submission], look_up_ms: float) -> list[Decision | TraceConflict]:
        clock = _Stopwatch()
        vectors = self._embed(batch)
        embed_ms = clock.lap_ms()
        novelties = self._place(batch, vectors)
        timings = Timings(look_up_ms=look_up_ms, embed_ms=embed_ms, place_ms=clock.lap_ms(), batch_size=len(batch))
        decided = {
            index: self._judge(trace, novelty, timings)
            for index, ((trace, _), novelty) in enumerate(zip(batch, novelties, strict=True))
            if novelty is not None
        }
        verdicts = [
            Verdict(decision.trace_id, batch[index].content, decision.model_dump_json().encode())
            for index, decision in decided.items()
        ]
        results: list[Decision | TraceConflict] = [TraceConflict(trace.id) for trace, _ in batch]
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
        candidates = [Candidate(trace.id, content, vector) for (trace, content), vector in zip(batch, vectors, strict=True)]
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
