"""Scoring in this process alone: no Redis, no broker, and an empty cache to start with."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding import select_embedder
from kp_scorer.novelty import MemoryLog, NoveltyCache
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import MemoryLedger
from kp_scorer.trace import ReasoningTrace


def score_traces(traces: Iterable[Mapping[str, Any] | ReasoningTrace], settings: Settings | None = None) -> Iterator[Decision]:
    """Score traces one after the other, each compared with those before it, and yield their decisions.

    Args:
        traces: ReasoningTraces, or their parsed JSON.
        settings: how to score; by default what the environment and the configuration file say.

    Raises:
        InvalidTrace: a trace is not a ReasoningTrace, or over a limit.
        TraceConflict: a trace has the id of an earlier one and other content.
        SettingsError: a setting is wrong, or an embedder is required and cannot be loaded.
    """
    settings = settings or load_settings()
    decider = offline_decider(settings)
    for trace in traces:
        checked = trace if isinstance(trace, ReasoningTrace) else decode_trace(trace, settings.limits)
        (settled,) = decider.decide([checked])
        if not isinstance(settled, Decision):
            raise settled
        yield settled


def offline_decider(settings: Settings) -> Decider:
    """Make a decider that keeps its log and decisions in memory.

    Raises:
        SettingsError: an embedder is required and cannot be loaded.
    """
    embedder = select_embedder(settings.embedding)
    novelty = None
    if embedder is not None:
        window = settings.novelty.window()
        novelty = NoveltyMeter(embedder, NoveltyCache(MemoryLog(window), window, embedder.dimensions))
    return Decider(MemoryLedger(), settings.scoring.policy(), novelty, settings.worker.max_attempts)
