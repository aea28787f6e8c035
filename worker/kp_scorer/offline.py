"""Scoring in this process alone: no Redis, no broker, and an empty cache to start with."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kp_scorer.decider import Decider, NoveltyMeter, Resolved
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding import select_embedder
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.ledger import MemoryLedger
from kp_scorer.novelty import MemoryLog
from kp_scorer.settings import Settings, load_settings
from kp_scorer.trace import ReasoningTrace


def score_traces(traces: Iterable[Mapping[str, Any] | ReasoningTrace], settings: Settings | None = None) -> Iterator[Decision]:
    """Score traces one after the other, each compared with those before it, and yield their decisions.

    They are read in batches of ``worker.batch_size``, because embedding them together is faster. Where a decision must not wait
    for later traces, set it to 1. Settings are by default those of the environment and the configuration file.

    Raises:
        InvalidTrace: a trace is not a ReasoningTrace, or over a limit.
        TraceConflict: a trace has the id of an earlier one and other content.
        SettingsError: a setting is wrong, or an embedder is required and cannot be loaded.
    """
    settings = settings or load_settings()
    decider = offline_decider(settings)
    for batch in _batches(traces, settings):
        for resolved in decide_offline(decider, batch):
            if not isinstance(resolved, Decision):
                raise resolved
            yield resolved


def decide_offline(decider: Decider, batch: Sequence[ReasoningTrace]) -> Iterator[Resolved]:
    """Decide a batch, in order, as if it were decided one by one: a trace that cannot be decided fails none before it.

    Raises:
        EmbedderUnhealthy: the embedder fails whatever it is given. Any other error is the fault of the trace whose turn it is.
    """
    try:
        together = decider.decide(batch)
    except ServiceUnavailable:
        raise
    except Exception:
        # Some text in it cannot be embedded.
        together = []
    yield from together
    for trace in batch[len(together) :]:
        yield from decider.decide([trace], alone=True)


def offline_decider(settings: Settings) -> Decider:
    """Make a decider that keeps its log and decisions in memory.

    Raises:
        SettingsError: an embedder is required and cannot be loaded.
    """
    embedder = select_embedder(settings.embedding, settings.novelty.recipe)
    window = settings.novelty.window()
    novelty = NoveltyMeter(embedder, MemoryLog(window), window) if embedder else None
    return Decider(MemoryLedger(), settings.scoring.policy(), novelty, settings.worker.max_attempts)


def _batches(traces: Iterable[Mapping[str, Any] | ReasoningTrace], settings: Settings) -> Iterator[list[ReasoningTrace]]:
    """Checked traces; an error, of a trace or of the iterable, is raised after the traces before it."""
    batch: list[ReasoningTrace] = []
    try:
        for trace in traces:
            batch.append(trace if isinstance(trace, ReasoningTrace) else decode_trace(trace, settings.limits))
            if len(batch) == settings.worker.batch_size:
                yield batch
                batch = []
    except Exception:
        yield batch
        raise
    yield batch
