"""The steps of deciding traces: the only place where scoring, embedding, novelty and the ledger meet."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from itertools import repeat
from typing import Final

from kp_scorer.checks.checks import Checks
from kp_scorer.decision import CheckResult, Decision, Nearest, Novelty, Pinned, Received, Timings
from kp_scorer.embedding.embedder import CheckedEmbedder, Counts, Embedder, TokenizedText, Vector
from kp_scorer.errors import ServiceUnavailable, SettingsError, TraceConflict, TraceDead, TraceHeld
from kp_scorer.logs import library_logger
from kp_scorer.novelty import Candidate, NoveltyCache, NoveltyLog, Placement, Window
from kp_scorer.novelty.pins import NO_EMBEDDER, Pins
from kp_scorer.scoring import Policy, novelty_of, score
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import UnreadableAction
from kp_scorer.store import Store
from kp_scorer.store.ledger import Ledger
from kp_scorer.store.records import Identity, Record, Verdict
from kp_scorer.trace import Digests, ReasoningTrace

_NAME_CHARS: Final = 200

log = library_logger(__name__)

Resolved = Decision | TraceConflict | TraceDead | TraceHeld  # Held: another worker is deciding it.

UNREADABLE: Final = (
    "the model does not know the script, so such traces look alike: set embedding.embedder to words, which reads all, "
    "or novelty.unreadable to unknown"
)
Comparison = tuple[Novelty, tuple[Pinned, ...]]  # With earlier traces, and with the entries of pinned sets.


def open_pins(settings: Settings, store: Store | None, embedder: Embedder | None) -> Pins | None:
    """The pinned sets that the settings name, not loaded yet; raises SettingsError if there is nothing to compare them with."""
    if not settings.novelty.pinned or not store:
        return None
    if embedder is None:
        raise SettingsError(NO_EMBEDDER)
    return Pins(store.pinned_sets(embedder.space), settings.novelty.limits, embedder.dimensions)


class NoveltyMeter:
    """The embedder and the cache its vectors go to, by the log of its space; there is never one without the other."""

    def __init__(
        self,
        embedder: Embedder,
        log: NoveltyLog,
        window: Window,
        pins: Pins | None = None,
        unreadable: UnreadableAction = "score",
    ) -> None:
        self.embedder = embedder
        self._unreadable = unreadable
        self._has_logged_unreadable = False
        self._window = window
        self.cache = NoveltyCache(log, window, embedder.dimensions)
        self.checked = CheckedEmbedder(embedder)
        self._pins = pins

    @property
    def missing(self) -> str:
        """Which pinned set is gone, since when nothing is decided; empty if none."""
        return self._pins.missing if self._pins else ""

    def asked(self, trace: ReasoningTrace) -> str | None:
        """What is embedded besides the text of a trace, where texts are pinned: its objective."""
        return trace.task.objective if self._pins and self._pins.has_texts else None

    def embed(
        self, traces: Sequence[ReasoningTrace], *, alone: bool = False
    ) -> list[tuple[TokenizedText, Vector, Vector | None]]:
        """Embed traces and what is asked in them, in order, and equal texts once.

        ``alone`` is a trace that failed together with others. EmbedderUnhealthy if the embedder fails whatever it is given; any
        other error is the fault of the traces.
        """
        owns = self._embed([self.embedder.recipe.text(trace) for trace in traces], alone=alone)
        objectives = [asked for asked in map(self.asked, traces) if asked is not None]
        asked = self._embed(objectives, alone=alone, plain=True) if objectives else [(None, None)] * len(traces)
        return [(*own, vector) for own, (_, vector) in zip(owns, asked, strict=True)]

    def _embed(self, texts: Sequence[str], *, alone: bool, plain: bool = False) -> Sequence[tuple[TokenizedText, Vector]]:
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        tokenized = [self.checked.tokenize(text, alone=alone, plain=plain) for text in rows]
        vectors = self.checked.embed(tokenized, alone=alone)
        return [(tokenized[rows[text]], vectors[rows[text]]) for text in texts]

    def candidate(self, trace: ReasoningTrace, digests: Digests, vector: Vector) -> Candidate:
        """The trace as the log admits it: with whether it counts for all later ones."""
        least = self._window.succeeded_confidence
        counts = least is None or (trace.metadata.success and trace.outcome.confidence >= least)
        return Candidate(trace.id, digests.content, vector, counts, digests.visible)

    def place(self, candidates: Sequence[Candidate], asked: Sequence[Vector | None] = ()) -> list[Comparison | None]:
        """Place candidates, idempotently, and compare each, and the vectors ``asked``; None if another digest has its id."""
        if self._pins:
            # First, so that nothing is placed that cannot be decided.
            self._pins.refresh()
        placements = self.cache.place(candidates)
        admitted = [placement.place for placement in placements if placement]
        pinned: Iterator[tuple[Pinned, ...]] = repeat(())
        if self._pins and admitted:
            compared = [vector for vector, placement in zip(asked, placements, strict=True) if placement]
            pinned = iter(self._pins.compare(self.cache.mirror.vectors(admitted), compared))
        return [(self._novelty(placement), next(pinned)) if placement else None for placement in placements]

    def with_counts(self, novelty: Novelty, counts: Counts) -> Novelty:
        """The novelty, with how much of its text was embedded; of unknown value where what was says nothing of the trace."""
        *tokens, has_words = counts
        novelty = novelty.model_copy(update=dict(zip(Counts._fields, tokens, strict=False)))
        if novelty.is_unreadable and not self._has_logged_unreadable:
            self._has_logged_unreadable = True
            log.warning("text_unreadable", unknown_tokens=novelty.unknown_tokens, detail=UNREADABLE)
        is_unknown = not has_words or (novelty.is_unreadable and self._unreadable == "unknown")
        if is_unknown and novelty.nearest and not novelty.duplicate_of:
            return novelty.model_copy(update={"source": "unreadable", "nearest": None})
        return novelty

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
    """A trace on its way to a decision."""

    trace: ReasoningTrace
    digests: Digests
    is_claimed: bool = False  # Whether this worker decides it.
    vector: Vector | None = None
    asked: Vector | None = None  # Of its objective alone, where texts are pinned.
    tokens: Counts = field(default_factory=Counts)
    checks: tuple[CheckResult, ...] = ()
    resolved: Resolved | None = None  # None until it is resolved, and for a trace that is to be decided again, alone.
    received: Received | None = None
    times_ms: dict[str, float] = field(default_factory=dict)  # Of its steps so far, by the fields of ``Timings``.

    @property
    def identity(self) -> Identity:
        """By which the ledger knows the trace."""
        return Identity(self.trace.id, self.digests.content)


@dataclass
class Decider:
    """Turns traces into decisions: acquires, checks and embeds them, places and commits them, each for several at a time.

    ``acquire`` and ``finish`` take one round trip and two. One thread owns each, and ``check``; the mirror belongs to that of
    ``finish``. Any thread may release.
    """

    ledger: Ledger
    policy: Policy
    novelty: NoveltyMeter | None  # Without it every trace's novelty is unknown.
    max_attempts: int  # A trace is dead once so many workers have died or stalled while they decided it.
    _: KW_ONLY
    names_nearest: bool = True
    checks: Checks | None = None
    sample: float = 0.0  # The share of all traces, 0..1, that is sampled for review.

    def decide(self, traces: Sequence[ReasoningTrace], *, alone: bool = False) -> list[Resolved]:
        """Decide the traces, in order; ``alone``: there is one, which failed before together with others.

        Deciding again is idempotent: a decided trace keeps its decision. Nothing was lost after ServiceUnavailable, as Redis
        cannot be reached, nor after EmbedderUnhealthy, as the embedder fails whatever it is given: decide in another process.
        """
        cases = self._decide(traces, alone=alone)
        for index, trace in enumerate(traces):
            while cases[index].resolved is None:
                cases[index : index + 1] = self._decide([trace], alone=True)
        return [case.resolved for case in cases if case.resolved is not None]

    def _decide(self, traces: Sequence[ReasoningTrace], *, alone: bool) -> list[Case]:
        cases = self.acquire(traces, alone=alone)
        for case in cases:
            self.check(case)
        self.embed(cases, alone=alone)
        self.finish(cases)
        return cases

    def acquire(self, traces: Sequence[ReasoningTrace], *, alone: bool = False) -> list[Case]:
        """Look traces up, and lease those that are to be decided.

        A trace whose worker has ended before is left out, unless it is acquired ``alone``: if it is what ended the worker, no
        other trace fails with it. Raises the errors of :meth:`decide`.
        """
        # Copies are found in the log alone, and their digest costs a long trace a quarter of a millisecond.
        cases = [Case(trace, trace.digests() if self.novelty else Digests(trace.digest(), b"")) for trace in traces]
        started = time.perf_counter()
        records = self.ledger.acquire([case.identity for case in cases], alone=alone)
        look_up_ms = ms_since(started)
        for case, record in zip(cases, records, strict=True):
            case.times_ms |= {"look_up_ms": look_up_ms, "embed_ms": 0.0}
            case.resolved = self._by_record(case.identity, record)
            case.is_claimed = case.resolved is None and (alone or not record.attempts)
        return cases

    def check(self, case: Case) -> None:
        """Check the trace, if it is claimed."""
        if self.checks and case.is_claimed:
            case.checks = self.checks.run(case.trace)

    def embed(self, cases: Sequence[Case], *, alone: bool = False) -> None:
        """Embed the claimed traces together; a worker embeds each as soon as it can. Raises the errors of :meth:`decide`."""
        claimed = [case for case in cases if case.is_claimed]
        if not claimed or not self.novelty:
            return
        started = time.perf_counter()
        with self._releasing(claimed):
            embedded = self.novelty.embed([case.trace for case in claimed], alone=alone)
        for case, (tokenized, vector, asked) in zip(claimed, embedded, strict=True):
            case.tokens, case.vector, case.asked = tokenized.counts, vector, asked
            case.times_ms["embed_ms"] = ms_since(started)

    def finish(self, cases: Sequence[Case]) -> None:
        """Place, judge and commit the claimed traces, which sets ``resolved``; not that of one to be decided again, alone."""
        if claimed := [case for case in cases if case.is_claimed]:
            with self._releasing(claimed):
                self._place_and_commit(claimed)

    def release(self, cases: Sequence[Case]) -> None:
        """End the leases of traces that are not being decided any more: this worker lives and may not receive them again."""
        # If this fails, another worker waits until the lease expires.
        with suppress(ServiceUnavailable):
            self.ledger.release([case.trace.id for case in cases])

    def refresh(self) -> None:
        """Bring the mirror up to date while there is nothing to decide."""
        if self.novelty:
            self.novelty.cache.catch_up()

    @contextmanager
    def _releasing(self, claimed: Sequence[Case]) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.release(claimed)
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
        if record.attempts >= self.max_attempts:
            return TraceDead(identity.trace_id, "poison", f"{record.attempts} workers died or stalled while they decided it")
        return None

    def _place_and_commit(self, claimed: Sequence[Case]) -> None:
        started = time.perf_counter()
        comparisons: Sequence[Comparison | None] = [(Novelty(source="no_embedder"), ())] * len(claimed)
        if meter := self.novelty:
            comparisons = meter.place(
                [meter.candidate(each.trace, each.digests, each.vector) for each in claimed if each.vector is not None],
                [each.asked for each in claimed],
            )
        place_ms = ms_since(started)
        judged: list[tuple[Case, Decision]] = []
        for case, comparison in zip(claimed, comparisons, strict=True):
            if comparison is None:
                case.resolved = TraceConflict(case.trace.id)
            else:
                timings = Timings(**case.times_ms, place_ms=place_ms, batch_size=len(claimed))
                novelty, pinned = comparison
                if self.novelty:
                    novelty = self.novelty.with_counts(novelty, case.tokens)
                judged.append((case, self._judge(case, novelty, pinned, timings)))
        self._commit(judged)

    def _commit(self, judged: Sequence[tuple[Case, Decision]]) -> None:
        verdicts = [
            Verdict(
                *case.identity,
                decision.model_dump_json().encode(),
                decision.novelty.entry or "",
                decision.domain,
                decision.domain in self.policy.domains,
                " ".join(guard.name for guard in decision.guards if guard.fired),
            )
            for case, decision in judged
        ]
        for (case, own), committed in zip(judged, self.ledger.commit(verdicts), strict=True):
            if committed == "stored":
                case.resolved = own
            elif committed != "again":
                case.resolved = committed

    def _judge(self, case: Case, novelty: Novelty, pinned: tuple[Pinned, ...], timings: Timings) -> Decision:
        trace = case.trace
        scored = score(trace, novelty_of(novelty.nearest.similarity if novelty.nearest else None), self.policy)
        domain = trace.metadata.task_domain
        bounds = self.policy.bounds(domain, trace.metadata.quality_threshold)
        is_copy = novelty.duplicate_of is not None
        guards = (
            *self.policy.guard_confidence(trace.outcome.confidence),
            *self.policy.guard_novelty(domain, scored.dimensions.novelty, novelty.source, is_copy=is_copy),
        )
        return Decision(
            trace_id=trace.id,
            domain=domain,
            agent_id=_short(trace.metadata.agent_id),
            framework=_short(trace.metadata.framework),
            visibility=trace.metadata.visibility,
            privacy_level=trace.metadata.privacy_level,
            taken_for=self.policy.aliases.get(domain),
            outcome=bounds.outcome(scored.score, guards, [each.outcome for part in (case.checks, pinned) for each in part]),
            **bounds._asdict(),
            **scored._asdict(),
            guards=guards,
            checks=case.checks,
            # A producer may choose the id so that the trace is not sampled; the place nobody chooses.
            sampled=self.sample if fraction_of(novelty.entry or trace.id) < self.sample else None,
            novelty=novelty if self.names_nearest else novelty.model_copy(update={"nearest": None, "duplicate_of": None}),
            pinned=pinned if self.names_nearest else tuple(each.model_copy(update={"nearest": None}) for each in pinned),
            received=case.received,
            timings=timings,
            decided_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )


def fraction_of(text: str) -> float:
    """A number in 0..1, without 1, that is always the same for a text and evenly spread over texts: its BLAKE2b in 6 bytes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def _short(name: str | None) -> str | None:
    """A name that a decision can carry: unread decisions and records are bounded by number."""
    return name if name is not None and len(name) <= _NAME_CHARS else None


def ms_since(started: float) -> float:
    """Milliseconds since a time of ``perf_counter``."""
    return round((time.perf_counter() - started) * 1_000, 3)
