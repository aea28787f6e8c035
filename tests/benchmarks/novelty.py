"""What novelty tells apart, for each recipe: the first trace of a task from further ones, on the real traces in file order.

They are scored from an empty log, as one worker would score them. The first trace of all has nothing to be compared with and is
left out. Traces of one task are those that ``groups.json``, beside the traces, puts together.

- ``told_apart``: the share of pairs of a first trace and a repeat, of whatever tasks, in which the first is newer (the area
  under the ROC curve); a tie is half a pair. Similarities are rounded to 1e-5.
- ``of_firsts``, ``of_repeats``: their mean novelty.
- ``repeats_below``, ``firsts_below``: the shares below a novelty of 0.105.
- ``embedded_per_s``, ``ratio``: traces that the bare embedder embeds a second, and how many times as many as by the recipe
  `trace`; the recipes take turns batch by batch, and both are medians of the passes.
"""

import argparse
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Final

import numpy as np
from kp_scorer.embedding import RECIPES, Embedder, select_embedder
from kp_scorer.offline import score_traces
from kp_scorer.settings import RecipeName, WorkerSettings, load_settings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, batches, emit, real, say, show_table
from tests.support.paths import REFERENCE_TRACES

Novelties = np.ndarray[tuple[int], np.dtype[np.float64]]

_LOW: Final = 0.105
_BATCH: Final = WorkerSettings().batch_size

_COLUMNS: Final = {
    "recipe": "recipe",
    "told_apart": "told apart",
    "of_firsts": "of firsts",
    "of_repeats": "of repeats",
    "repeats_below": "repeats below",
    "firsts_below": "firsts below",
    "embedded_per_s": "embedded/s",
    "ratio": "ratio",
}


def main() -> None:
    """Measure each recipe and write a line of JSON for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="passes that measure speed (default: 3)")
    options = parser.parse_args()
    workload = real()
    if workload is None:
        parser.error(f"there are no real traces in {REFERENCE_TRACES}; name their folder with REFERENCE_TRACES")
    is_repeat = repeats_among(workload.traces)
    embedders = {recipe: embedder_of(recipe) for recipe in RECIPES}
    passes = [seconds_of(embedders, workload.traces) for _ in range(options.repeats)]
    rows: list[Row] = []
    for recipe in RECIPES:
        say(f"recipe {recipe}")
        decisions = score_traces(workload.traces, load_settings({"embedding.required": True, "novelty.recipe": recipe}))
        novelty = np.round([decision.dimensions.novelty for decision in decisions], 5)[1:]
        firsts, repeats = novelty[~is_repeat[1:]], novelty[is_repeat[1:]]
        row: Row = {
            "benchmark": "novelty",
            "recipe": recipe,
            "firsts": len(firsts),
            "repeats": len(repeats),
            "told_apart": round(told_apart(firsts, repeats), 4),
            "of_firsts": round(float(firsts.mean()), 4),
            "of_repeats": round(float(repeats.mean()), 4),
            "repeats_below": round(float((repeats < _LOW).mean()), 4),
            "firsts_below": round(float((firsts < _LOW).mean()), 4),
            "embedded_per_s": round(median(len(workload.traces) / each[recipe] for each in passes), 2),
            "ratio": round(median(each["trace"] / each[recipe] for each in passes), 3),
        }
        rows.append(row)
        emit(row)
    show_table(rows, _COLUMNS)


def repeats_among(traces: Sequence[ReasoningTrace]) -> "np.ndarray[tuple[int], np.dtype[np.bool]]":
    """Whether a trace of the same task came before, for each trace; a trace in no group is a task of its own."""
    groups = json.loads((REFERENCE_TRACES / "groups.json").read_text("utf-8"))
    task_of = {trace_id: task for task, trace_ids in groups.items() for trace_id in trace_ids}
    tasks = [task_of.get(trace.id, trace.id) for trace in traces]
    return np.array([task in tasks[:index] for index, task in enumerate(tasks)])


def told_apart(
    firsts: "np.ndarray[tuple[int], np.dtype[np.float64]]", repeats: "np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> float:
    """The share of pairs in which the first is newer; a tie is half a pair."""
    return float((firsts[:, None] > repeats).mean() + (firsts[:, None] == repeats).mean() / 2)


def embedder_of(recipe: RecipeName) -> Embedder:
    """The embedder that a worker with this recipe would use."""
    found = select_embedder(load_settings({"embedding.required": True}).embedding, recipe)
    assert found
    return found


def seconds_of(embedders: dict[RecipeName, Embedder], traces: Sequence[ReasoningTrace]) -> dict[RecipeName, float]:
    """Embed all traces by each recipe, in turns; the seconds of each."""
    seconds = dict.fromkeys(embedders, 0.0)
    for batch in batches(traces, _BATCH):
        for recipe, embedder in embedders.items():
            texts = list(map(RECIPES[recipe].text, batch))
            started = time.perf_counter()
            embedder.embed(texts)
            seconds[recipe] += time.perf_counter() - started
    return seconds


if __name__ == "__main__":
    main()
