"""Filling a novelty log with traces that are not decided by it."""

from collections import deque
from collections.abc import Sequence

from kp_scorer.cli.input import Line
from kp_scorer.cli.output import print_json, progress, refused
from kp_scorer.cli.reading import Reading
from kp_scorer.decider import NoveltyMeter
from kp_scorer.embedding import select_embedder
from kp_scorer.errors import InvalidTrace, SettingsError, TraceConflict
from kp_scorer.novelty import Candidate
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.trace import ReasoningTrace


def open_meter(store: Store, settings: Settings) -> NoveltyMeter:
    """Load the embedder that workers with these settings will have, and join it to the log of its space.

    Raises:
        SettingsError: there is no embedder, or it cannot be loaded.
    """
    embedder = select_embedder(settings.embedding, settings.novelty.recipe)
    if embedder is None:
        raise SettingsError(
            "embedding.embedder: there is no embedder, so nothing can be warmed; "
            "install kp-scorer[embedding], and set embedding.embedder = auto"
        )
    return NoveltyMeter(embedder, store.novelty_log(embedder.space), settings.novelty.window())


def newest_traces(reading: Reading, most: int) -> tuple[list[Line], int]:
    """The last lines of an input that are traces, oldest first; and how many lines are none, each of which is reported."""
    newest: deque[Line] = deque(maxlen=most)
    invalid = 0
    for batch in reading.batches():
        for line in batch:
            if isinstance(line.trace, InvalidTrace):
                invalid += 1
                print_json(refused(line, line.trace))
            else:
                newest.append(line)
    return list(newest), invalid


def warm_up(store: Store, meter: NoveltyMeter, lines: Sequence[Line], at_once: int) -> int:
    """Embed and place the traces on these lines, in order; return how many ids were taken, each of which is reported.

    Raises:
        SettingsError: the log is not empty, and was begun with another window.
        ServiceUnavailable: the log cannot be reached, or Redis is nearly full; what is placed stays.
        EmbedderSick: the embedder fails whatever it is given. Any other error is the fault of a trace.
    """
    conflicts = 0
    with progress("warmed") as advance:
        for start in range(0, len(lines), at_once):
            batch = lines[start : start + at_once]
            traces = [line.trace for line in batch if isinstance(line.trace, ReasoningTrace)]
            # It would take what is left of Redis as workers may, to no end that frees it: so only while submissions are taken.
            store.ledger.open(())
            vectors = meter.embed(traces, alone=False)
            candidates = [Candidate(trace.id, trace.digest(), vector) for trace, vector in zip(traces, vectors, strict=True)]
            for line, candidate, placed in zip(batch, candidates, meter.place(candidates), strict=True):
                if placed is None:
                    conflicts += 1
                    print_json(refused(line, TraceConflict(candidate.trace_id)))
            advance(start + len(batch), len(lines))
    return conflicts
