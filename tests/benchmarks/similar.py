"""Measures how fast the kept runs most similar to a task are found, and what the nearest one is worth to a later run.

speed  the time to build the index of a file with copies of real traces, whose objectives all differ, and the median time to
       answer a question, in one process on one core, beside a plain loop with numpy over vectors in memory
calls  the share of a later successful run's calls that have the name of the nearest call of the kept run with the nearest
       task, by the number of kept runs, in sets of runs that are read and halved as by tests.benchmarks.value; beside it the
       same for the nearest of as many random successes, and for one random success
"""

import json
import os
import statistics
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from kp_scorer.coverage import Coverage
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.kept import KeptRuns
from kp_scorer.settings import load_settings

from tests.benchmarks.common import Row, arguments, report, say, show_table, typical
from tests.benchmarks.value import Runs, halves, read_runs
from tests.support.paths import REFERENCE_TRACES


def speed(runs: int, questions: int) -> Row:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    traces, chance = typical(), np.random.default_rng(1)
    tasks = [trace.task.objective for trace in traces]
    asked = [f"{task} {chance.integers(10**6)}" for task in islice(cycle(tasks), questions)]
    embedder = WordsEmbedder()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kept.jsonl"
        with file.open("w") as lines:
            for number, trace in enumerate(islice(cycle(traces), runs)):
                document = trace.model_dump(mode="json", by_alias=True, exclude_none=True)
                document["id"], document["metadata"]["success"] = f"kp:trace:{number}", True
                document["task"]["objective"] += f" {number}"
                lines.write(json.dumps(document) + "\n")
        say(f"{runs:,} runs, {file.stat().st_size / 1e6:,.0f} MB")
        kept_runs = KeptRuns(file, load_settings({"embedding.embedder": "words"}))
        # Measure processor time, as others may use the machine.
        started = time.process_time()
        kept_runs.similar(asked[0])
        built_s = time.process_time() - started
        seconds = []
        for task in asked:
            started = time.process_time()
            similar = kept_runs.similar(task)
            seconds.append(time.process_time() - started)
            assert len(similar) == 5
        vectors = np.concatenate([embedder.embed([task]) for task in islice(cycle(tasks), runs)])
        started = time.process_time()
        query = embedder.embed([asked[0]])[0]
        sorted(range(runs), key=lambda place: -float(vectors[place] @ query))[:5]
        loop_s = time.process_time() - started
    median_s = statistics.median(seconds)
    row: Row = {"runs": runs, "index_s": built_s, "median_ms": median_s * 1e3, "of_50_ms": median_s / 0.05}
    return row | {"loop_ms": loop_s * 1e3, "times_as_fast": loop_s / median_s}


def calls(runs: Runs, numbers: list[int], shuffles: int) -> list[Row]:
    """Return the share of calls that a kept run names, by the number of kept runs, for the nearest run and for random ones."""
    asked = WordsEmbedder().embed([trace.task.objective for trace in runs.traces])
    named: dict[tuple[int, str], list[float]] = {}
    for seed in range(shuffles):
        chance = np.random.default_rng(seed)
        first, second = halves(runs, chance, "equally")
        later = [place for place in second if runs.succeeded[place] and runs.calls[place]]
        successes = np.array([place for place in first if runs.succeeded[place] and runs.calls[place]])
        for number in numbers:
            if number > len(successes):
                continue
            chosen = Coverage(runs.words[:0]).choose(runs.words[first], runs.succeeded[first].tolist(), number)
            chosen_places = np.array([first[run.place] for run in chosen if runs.calls[first[run.place]]])
            at_random = chance.choice(successes, number, replace=False)
            nearest = chosen_places[(asked[later] @ asked[chosen_places].T).argmax(axis=1)]
            for way, examples in {
                "the nearest kept run": nearest,
                "the nearest of random successes": at_random[(asked[later] @ asked[at_random].T).argmax(axis=1)],
                "a random success": chance.choice(successes, len(later)),
            }.items():
                shares = [_share_named(runs, place, int(example)) for place, example in zip(later, examples, strict=True)]
                named.setdefault((number, way), []).append(float(np.mean(shares)))
    return [
        {"set": runs.name, "kept": number, "shown": way, "calls": float(np.mean(shares)), "error": float(np.std(shares))}
        for (number, way), shares in named.items()
    ]


def _share_named(runs: Runs, place: int, example: int) -> float:
    likenesses = runs.before_calls[place] @ runs.before_calls[example].T
    return float(np.mean(np.array(runs.calls[example])[likenesses.argmax(axis=1)] == np.array(runs.calls[place])))


def main() -> None:
    options = arguments(__doc__, runs=100_000, questions=100, kept=[5, 20, 50, 100, 200], shuffles=8).parse_args()
    rows = [
        row
        for file in sorted((REFERENCE_TRACES / "sets").glob("*.jsonl.gz"))
        for row in calls(read_runs(file), options.kept, options.shuffles)
    ]
    rows.append(speed(options.runs, options.questions))
    report("similar", rows)
    show_table(rows[:-1])
    show_table(rows[-1:])


if __name__ == "__main__":
    main()
