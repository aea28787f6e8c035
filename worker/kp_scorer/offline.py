"""Scoring in this process alone: no Redis, no broker, and an empty cache to start with."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from kp_scorer.decider import Decider, NoveltyMeter, Settled
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding import select_embedder
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.novelty import MemoryLog
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import MemoryLedger
from kp_scorer.trace import ReasoningTrace


def score_traces(traces: Iterable[Mapping[str, Any] | ReasoningTrace], settings: Settings | None = None) -> Iterator[Decision]:
    """Score traces one after the other, each compared with those before it, and yield their decisions.

    ``worker.batch_size`` of them are taken at a time, 32 unless set otherwise, before the first of their decisions is yielded:
    embedding them together is faster. Where decisions must not wait for traces that are yet to come, set it to 1.

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
    taken = iter(traces)
    while True:
        batch, error = _take(taken, settings)
        for settled in decide_offline(decider, batch):
            if not isinstance(settled, Decision):
                raise settled
            yield settled
        if error:
            raise error
        if not batch:
            return


def decide_offline(decider: Decider, batch: Sequence[ReasoningTrace]) -> Iterator[Settled]:
    """Decide a batch, in order, as if it were decided one by one: what cannot be decided takes none before it along.

    Raises:
        EmbedderSick: the embedder fails whatever it is given. Any other error is the fault of the trace whose turn it is.
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
        yield from decider.decide([trace])


def offline_decider(settings: Settings) -> Decider:
    """Make a decider that keeps its log and decisions in memory.

    Raises:
        SettingsError: an embedder is required and cannot be loaded.
    """
    embedder = select_embedder(settings.embedding, settings.novelty.recipe)
    novelty = None
    if embedder is not None:
        window = settings.novelty.window()
        novelty = NoveltyMeter(embedder, MemoryLog(window), window)
    return Decider(MemoryLedger(), settings.scoring.policy(), novelty, settings.worker.max_attempts)


def _take(
    traces: Iterator[Mapping[str, Any] | ReasoningTrace], settings: Settings
) -> tuple[list[ReasoningTrace], Exception | None]:
    """Take a batch; return too what is to be raised after it, be it of a trace or of whoever gives them."""
    batch: list[ReasoningTrace] = []
    try:
        for trace in islice(traces, settings.worker.batch_size):
            checked = trace if isinstance(trace, ReasoningTrace) else decode_trace(trace, settings.limits)
            batch.append(checked)
    except Exception as error:
        return batch, error
    return batch, None
