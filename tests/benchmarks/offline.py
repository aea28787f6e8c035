"""Traces scored in process, by ``score_traces``, beside the bare engine on the same texts.

They take turns, portion by portion, so that a machine that slows down for a minute slows both. What is scored is parsed JSON,
checked and compared with what came before it, as users give it; the engine gets the texts in batches of the same size.

- ``traces_per_s``, ``engine_traces_per_s``: the median of the portions.
- ``of_engine``: the median share of the engine's rate.
- ``of_engine_cpu``: the engine's share of the processor time, which depends less on what else the machine does.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Final, NamedTuple

from kp_scorer import score_traces
from kp_scorer.settings import load_settings

from tests.benchmarks.common import Row, batches, emit, real_embedder, say, show_table
from tests.benchmarks.load import traces

_COLUMNS: Final = {
    "traces": "traces",
    "traces_per_s": "traces/s",
    "engine_traces_per_s": "engine/s",
    "of_engine": "of engine",
    "of_engine_cpu": "of its CPU",
    "engine": "engine",
}


class Portion(NamedTuple):
    """Traces a second, scored and embedded, and processor seconds of either."""

    rate: float
    engine_rate: float
    cpu_s: float
    engine_cpu_s: float


def main() -> None:
    """Measure and write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--portions", type=int, default=10, metavar="N", help="how often they take turns (default: 10)")
    parser.add_argument("--batches", type=int, default=3, metavar="N", help="batches in a portion (default: 3)")
    options = parser.parse_args()
    settings, embedder = load_settings({"embedding.required": True}), real_embedder()
    batch = settings.worker.batch_size
    size = batch * options.batches
    items = traces(size * (options.portions + 1))
    scored = score_traces([trace.model_dump(mode="json", exclude_none=True) for trace in items], settings)
    portions: list[Portion] = []
    for portion in batches([trace.embedding_text for trace in items], size):
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        assert len(list(islice(scored, size))) == size
        between_s, between_cpu_s = time.perf_counter(), time.process_time()
        for texts in batches(portion, batch):
            embedder.embed(texts)
        ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
        rates = size / (between_s - started_s), size / (ended_s - between_s)
        portions.append(Portion(*rates, between_cpu_s - started_cpu_s, ended_cpu_s - between_cpu_s))
        say(f"{len(portions)}: {portions[-1].rate:.1f}/s, engine {portions[-1].engine_rate:.1f}/s")
    # The first loads the model, and is the first to meet every length.
    row = summary(portions[1:], size, embedder.engine)
    emit(row)
    show_table([row], _COLUMNS)


def summary(portions: Sequence[Portion], size: int, engine: str) -> Row:
    """Summarise the portions."""
    return {
        "benchmark": "offline",
        "traces": size * len(portions),
        "traces_per_s": round(median(one.rate for one in portions), 2),
        "engine_traces_per_s": round(median(one.engine_rate for one in portions), 2),
        "of_engine": round(median(one.rate / one.engine_rate for one in portions), 3),
        "of_engine_cpu": round(median(one.engine_cpu_s / one.cpu_s for one in portions), 3),
        "engine": engine,
    }


if __name__ == "__main__":
    main()
