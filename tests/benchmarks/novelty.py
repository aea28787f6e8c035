"""How well novelty separates the first trace of a task from repeats, for each recipe, on the real traces in file order.

They are scored from an empty log, as one worker would score them. The first trace of all has nothing to be compared with and is
left out. Traces of one task are those that ``groups.json``, beside the traces, puts together.

- ``separated``: the share of pairs of a first trace and a repeat, of whatever tasks, in which the first is newer (the area
  under the ROC curve); a tie is half a pair. Similarities are rounded to 1e-5.
- ``of_firsts``, ``of_repeats``: their mean novelty.
- ``repeats_below``, ``firsts_below``: the shares below a novelty of 0.105.
- ``embedded_per_s``, ``ratio``: traces that the bare embedder embeds a second, and how many times as many as by the recipe
  `trace`; the recipes take turns batch by batch, and both are medians of the passes.
"""

import json
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import numpy as np
from kp_scorer.embedding import RECIPES, Embedder, select_embedder
from kp_scorer.offline import score_traces
from kp_scorer.settings import RecipeName, WorkerSettings, load_settings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, batches, emit, real, say, show_table
from tests.support.paths import REFERENCE_TRACES

_LOW: Final = 0.105
_BATCH: Final = WorkerSettings().batch_size


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    options = parser.parse_args()
    traces = real()
    if not traces:
        parser.error(f"there are no real traces in {REFERENCE_TRACES}; name their folder with REFERENCE_TRACES")
    is_repeat = _repeats_among(traces)[1:]
    embedders = {recipe: _embedder_of(recipe) for recipe in RECIPES}
    passes = [_seconds_of(embedders, traces) for _ in range(options.repeats)]
    rows: list[Row] = []
    for recipe in RECIPES:
        say(f"recipe {recipe}")
        decisions = score_traces(traces, load_settings({"embedding.required": True, "novelty.recipe": recipe}))
        novelty = np.round([decision.dimensions.novelty for decision in decisions], 5)[1:]
        firsts, repeats = novelty[~is_repeat], novelty[is_repeat]
        rows.append(
            {
                "benchmark": "novelty",
                "recipe": recipe,
                "firsts": len(firsts),
                "repeats": len(repeats),
                "separated": float((firsts[:, None] > repeats).mean() + (firsts[:, None] == repeats).mean() / 2),
                "of_firsts": float(firsts.mean()),
                "of_repeats": float(repeats.mean()),
                "repeats_below": float((repeats < _LOW).mean()),
                "firsts_below": float((firsts < _LOW).mean()),
                "embedded_per_s": median(len(traces) / each[recipe] for each in passes),
                "ratio": median(each["trace"] / each[recipe] for each in passes),
            }
        )
        emit(rows[-1])
    show_table(rows)


def _repeats_among(traces: Sequence[ReasoningTrace]) -> "np.ndarray[tuple[int], np.dtype[np.bool]]":
    """Whether each trace repeats the task of an earlier one; a trace in no group is a task of its own."""
    groups = json.loads((REFERENCE_TRACES / "groups.json").read_text("utf-8"))
    task_of = {trace_id: task for task, trace_ids in groups.items() for trace_id in trace_ids}
    tasks = [task_of.get(trace.id, trace.id) for trace in traces]
    return np.array([task in tasks[:index] for index, task in enumerate(tasks)])


def _embedder_of(recipe: RecipeName) -> Embedder:
    embedder = select_embedder(load_settings({"embedding.required": True}).embedding, recipe)
    assert embedder
    return embedder


def _seconds_of(embedders: Mapping[RecipeName, Embedder], traces: Sequence[ReasoningTrace]) -> dict[RecipeName, float]:
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
