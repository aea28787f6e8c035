"""Scores traces in this process, without a broker, and without Redis unless sets are pinned. The window is empty at first."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from kp_scorer.adapters import FORMATS, Converter, SuppliedFields
from kp_scorer.checks.asking import Checks
from kp_scorer.decider import Decider, Resolved, open_gate, open_pins
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding.select import select_embedder
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, NotConverted, ScorerError, ServiceUnavailable, SettingsError, TraceDead
from kp_scorer.gate import MemoryFacts
from kp_scorer.limits import Limits
from kp_scorer.novelty import MemoryLog
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.scoring import novelty_of
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store
from kp_scorer.store.records import MemoryLedger
from kp_scorer.trace import PrivacyLevel, ReasoningTrace, Visibility


def convert(
    documents: Iterable[object],
    *,
    domain: str | None = None,
    confidence: float | None = None,
    success: bool | None = None,
    created_at: str | None = None,
    visibility: Visibility = "private",
    privacy_level: PrivacyLevel = "private",
    paths: Mapping[str, str] = MappingProxyType({}),
    format_name: str = "",
    settings: Settings | None = None,
) -> Iterator[dict[str, Any] | NotConverted]:
    """Convert logs of other tools; yield for each run a trace that may be scored and submitted, or the error that prevents it.

    A document may hold several runs, and a run may extend over several documents. The arguments from ``domain`` to
    ``privacy_level`` apply to runs whose source does not state them.

    Args:
        documents: parsed JSON, such as chats or spans.
        domain: the ``task_domain``.
        confidence: the confidence in the outcome, 0..1.
        success: whether the task was solved.
        created_at: the time of the run, in ISO 8601.
        visibility: with whom the trace may be shared.
        privacy_level: how it may be shared.
        paths: dotted paths to the fields of a record that hold its ``id``, ``success``, ``confidence``, ``task_domain`` or
            ``created_at``.
        format_name: a format, such as ``otel``; by default the shape of each document determines it.
        settings: their limits apply; by default those of the environment and the configuration file.

    Raises:
        SettingsError: a setting is wrong, or there is no format of this name.
    """
    if format_name not in ("", *FORMATS):
        raise SettingsError(f"format_name: expected one of {', '.join(FORMATS)}, got {format_name!r}")
    supplied = SuppliedFields(confidence, domain, visibility, privacy_level, success, created_at, paths)
    converter = Converter(supplied, (settings or load_settings()).limits, format_name)
    fed = (converter.feed(number, document) for number, document in enumerate(documents, 1))
    for result in chain(chain.from_iterable(fed), converter.end()):
        yield result if isinstance(result, NotConverted) else result.trace


class Scorer:
    """Scores traces one by one, each compared with those that it scored before. One thread at a time may use it.

    It keeps the window and the newest decisions, as many as the log of a worker has places. With a model, it works only in the
    process that created it, and raises ``EmbedderUnhealthy`` in one that is forked later.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        """Load the embedder; the settings are by default those of the environment and the configuration file.

        Raises:
            SettingsError: a setting is wrong, or an embedder is required and cannot be loaded.
        """
        settings = settings or load_settings()
        self._limits = settings.limits
        self._decider = offline_decider(settings)

    def score(self, trace: Mapping[str, Any] | ReasoningTrace) -> Decision:
        """Score a trace and add it to the window. A trace that was scored before keeps its decision.

        Raises:
            InvalidTrace: it is no ``ReasoningTrace``, or exceeds a limit.
            TraceConflict: an earlier trace has its id and other content.
            TraceDead: the embedder has no vector for its text.
        """
        checked = trace if isinstance(trace, ReasoningTrace) else decode_trace(trace, self._limits)
        resolved = _decide_alone(self._decider, checked)
        if not isinstance(resolved, Decision):
            raise resolved
        return resolved

    def how_new(self, text: str) -> float:
        """Return the novelty, 0..1, of a successful trace whose only text is this objective. Nothing is added to the window.

        It is 0.5 if there is nothing to compare with: no earlier trace in the window, or no embedder.

        Raises:
            InvalidTrace: the embedder has no vector for the text.
        """
        novelty = self._decider.novelty
        if novelty is None:
            return novelty_of(None)
        tokenized = novelty.checked_embedder.tokenize_all([text], alone=True)[0]
        try:
            (vector,) = novelty.checked_embedder.embed([tokenized], alone=True)
        except FloatingPointError:
            raise InvalidTrace.whole("expected a text that the embedder has a vector for") from None
        return novelty_of(novelty.cache.mirror.similarity(vector, time.time_ns() // 1_000_000))


def score_traces(traces: Iterable[Mapping[str, Any] | ReasoningTrace], settings: Settings | None = None) -> Iterator[Decision]:
    """Score traces in order, each compared with those before it, and yield their decisions.

    Traces are read in batches of a third of ``worker.concurrency``, because embedding them together is faster. If a decision
    must not wait for later traces, use a ``Scorer``.

    Args:
        traces: each a ``ReasoningTrace``, or its parsed JSON.
        settings: by default those of the environment and the configuration file.

    Raises:
        InvalidTrace: one is no ``ReasoningTrace``, or exceeds a limit; decisions on the traces before it come first.
        TraceConflict: an earlier trace has its id and other content.
        TraceDead: the embedder has no vector for its text.
        SettingsError: a setting is wrong, or an embedder is required and cannot be loaded.
    """
    settings = settings or load_settings()
    decider = offline_decider(settings)
    for batch in _batches(traces, settings.worker.batch_size, settings.limits):
        for resolved in decide_offline(decider, batch):
            if not isinstance(resolved, Decision):
                raise resolved
            yield resolved


def decide_offline(decider: Decider, batch: Sequence[ReasoningTrace]) -> Iterator[Resolved]:
    """Decide a batch in order, as if one by one: a trace that cannot be scored becomes dead, and the others are decided.

    Raises EmbedderUnhealthy if the embedder fails on every text.
    """
    try:
        together = decider.decide(batch)
    except ServiceUnavailable:
        raise
    except Exception:
        # Some text of the batch cannot be embedded, so decide the traces one by one.
        together = []
    yield from together
    for trace in batch[len(together) :]:
        yield _decide_alone(decider, trace)


def _decide_alone(decider: Decider, trace: ReasoningTrace) -> Resolved:
    try:
        (resolved,) = decider.decide([trace], alone=True)
    except ScorerError:
        raise
    except Exception as error:
        # A worker gives the same reason. Leave out the error's message, because it may quote the trace.
        return TraceDead(trace.id, "scoring_failed", type(error).__name__)
    return resolved


def offline_decider(settings: Settings) -> Decider:
    """Make a decider that keeps its log and decisions in memory. If there are pinned sets, it reads them from Redis.

    Raises SettingsError if a required embedder or a check cannot be loaded, or a pinned set does not exist;
    ServiceUnavailable if pinned sets cannot be read.
    """
    embedder = select_embedder(settings.embedding, settings.novelty.recipe)
    window = settings.novelty.window()
    try:
        store = Store.open(with_endpoints(settings)) if settings.novelty.pinned else None
    except SettingsError as error:
        raise SettingsError(f"novelty.pinned: the sets are in Redis; {error}") from None
    if pins := open_pins(settings.novelty, store, embedder):
        pins.load()
    novelty = NoveltyMeter(embedder, MemoryLog(window), window, pins, settings.novelty.unreadable) if embedder else None
    facts = MemoryFacts()
    gate = open_gate(settings.routing, settings.gate, novelty, facts)
    ledger, policy = MemoryLedger(window.kept_elements, facts if gate else None), settings.scoring
    checks = Checks(settings.checks) if settings.checks.names else None
    most, sample = settings.worker.max_attempts, settings.review.sample
    return Decider(ledger, policy, novelty, most, sample=sample, checks=checks, gate=gate)


def _batches(traces: Iterable[Mapping[str, Any] | ReasoningTrace], size: int, limits: Limits) -> Iterator[list[ReasoningTrace]]:
    """Yield checked traces in batches. If a trace is invalid or the iterable fails, yield the traces before, then raise."""
    batch: list[ReasoningTrace] = []
    try:
        for trace in traces:
            batch.append(trace if isinstance(trace, ReasoningTrace) else decode_trace(trace, limits))
            if len(batch) == size:
                yield batch
                batch = []
    except Exception:
        yield batch
        raise
    yield batch
