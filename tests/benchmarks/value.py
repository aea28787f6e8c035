"""Measures the value of a kept tenth of runs to later runs, beside a tenth of the successes at random.

Reads sets of runs with several runs a task: NAME.jsonl.gz, and NAME.tasks.json.gz with the task of each run's id. Each shuffle
halves the runs of each task, keeps a share of the first half by domain, and measures on the second half, with differences to
random successes:

  solved  of the runs whose task was solved in the first half, the share for which a solved run of the task was kept
  edit    how like (1 - normalised edit distance) the calls of a successful run are to those of the kept run whose objective is
          nearest by its characters, which is not how the runs are chosen

With --unequal 1 tasks recur unequally, as in life: of the r-th task a share of runs counts that falls as (r+1)^-0.7.
"""

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from kp_scorer import score_traces
from kp_scorer.coverage import Coverage, Vectors
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.settings import load_settings
from kp_scorer.trace import ReasoningTrace
from numpy.typing import NDArray

from tests.benchmarks.common import Row, arguments, report
from tests.support.paths import REFERENCE_TRACES

_SHUFFLES: Final = 8
_NEAR_COPY: Final = 0.7
_DIMENSIONS: Final = 4_096
_SHELLS: Final = ("", "bash", "sh", "shell", "execute", "command", "run")

Places = NDArray[np.intp]
Way = Callable[[Places, int], Sequence[int]]
"""Keeps some of the runs at these places of one domain: a number of them at most."""


class Runs(NamedTuple):
    """One set of runs, with what is measured of each."""

    name: str
    traces: Sequence[ReasoningTrace]
    tasks: Sequence[str]
    succeeded: NDArray[np.bool]
    domains: NDArray[np.str_]
    words: Vectors
    characters: Vectors  # Of the objectives.
    calls: Sequence[Sequence[str]]


def read_runs(file: Path) -> Runs:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        traces = [decode_trace(json.loads(line), Limits()) for line in lines]
    with gzip.open(file.with_name(file.name.replace(".jsonl", ".tasks.json")), "rt", encoding="utf-8") as opened:
        task_of = json.load(opened)
    embedder = WordsEmbedder()
    return Runs(
        file.name.removesuffix(".jsonl.gz"),
        traces,
        [task_of[trace.id] for trace in traces],
        np.array([trace.metadata.success for trace in traces]),
        np.array([trace.metadata.task_domain for trace in traces]),
        embedder.embed([embedder.recipe.text(trace) for trace in traces]),
        np.array([_characters(trace.task.objective[:1_500]) for trace in traces]),
        [list(_calls(trace)) for trace in traces],
    )


def _characters(text: str) -> NDArray[np.float32]:
    """Count the runs of four characters of a text by a hash, as a unit vector of shape (4096,)."""
    columns = [crc32(text[at : at + 4].lower().encode()) % _DIMENSIONS for at in range(max(1, len(text) - 3))]
    counts = np.log1p(np.bincount(columns, minlength=_DIMENSIONS)).astype(np.float32)
    unit: NDArray[np.float32] = counts / np.linalg.norm(counts)
    return unit


def _calls(trace: ReasoningTrace) -> Iterator[str]:
    for step in trace.steps:
        if step.type == "tool_call":
            name = step.tool.name if step.tool else ""
            # Of a shell the program that it runs says what was done.
            yield f"{name}:{(step.content or '?').split()[0]}" if name in _SHELLS and (step.content or "").split() else name


def halves(runs: Runs, chance: np.random.Generator, unequal: bool) -> tuple[Places, list[int]]:
    by_task = defaultdict[str, list[int]](list)
    for place in chance.permutation(len(runs.traces)):
        by_task[runs.tasks[place]].append(int(place))
    first: list[int] = []
    second: list[int] = []
    for rank, task in enumerate(chance.permutation(sorted(by_task))):
        places = by_task[str(task)]
        if unequal:
            share = min(1.0, (0.02 * len(by_task) + 1) / (rank + 1) ** 0.7 * 1.6)
            places = places[: max(1, round(len(places) * share))]
        half = len(places) // 2
        first += places[:half]
        second += places[half : 2 * half]
    return chance.permutation(np.array(first, np.intp)), second


def ways(runs: Runs, first: Places, chance: np.random.Generator) -> dict[str, Way]:
    settings = load_settings({"embedding.embedder": "words"})
    scores = dict(
        zip(first.tolist(), (each.score for each in score_traces([runs.traces[at] for at in first], settings)), strict=True)
    )

    def successes(places: Places) -> list[int]:
        return [int(place) for place in chance.permutation(places[runs.succeeded[places]])]

    def without_copies(places: Places, most: int) -> list[int]:
        members: list[int] = []
        for place in successes(places):
            if len(members) < most and (not members or (runs.words[members] @ runs.words[place]).max() < _NEAR_COPY):
                members.append(place)
        return members

    def covering(places: Places, most: int) -> list[int]:
        chosen = Coverage(runs.words[:0]).choose(runs.words[places], runs.succeeded[places].tolist(), most)
        return [int(places[run.place]) for run in chosen]

    return {
        "random successes": lambda places, most: successes(places)[:most],
        "any at random": lambda places, most: chance.permutation(places)[:most].tolist(),
        "score": lambda places, most: sorted(places.tolist(), key=lambda place: -scores[place])[:most],
        "near copies left out": without_copies,
        "coverage": covering,
    }


def measured(runs: Runs, first: Places, second: Sequence[int], chosen: Sequence[int]) -> tuple[float, float]:
    solved_tasks = {runs.tasks[place] for place in first if runs.succeeded[place]}
    won = {runs.tasks[place] for place in chosen if runs.succeeded[place]}
    solved = [runs.tasks[place] in won for place in second if runs.tasks[place] in solved_tasks]
    tested = [place for place in second if runs.succeeded[place] and runs.calls[place]]
    with_calls = np.array([place for place in chosen if runs.calls[place]])
    nearest = with_calls[(runs.characters[tested] @ runs.characters[with_calls].T).argmax(axis=1)]
    edits = [_likeness(runs.calls[place], runs.calls[neighbour]) for place, neighbour in zip(tested, nearest, strict=True)]
    return float(np.mean(solved)), float(np.mean(edits))


def _likeness(first: Sequence[str], second: Sequence[str]) -> float:
    """Compute 1 less the edit distance (Levenshtein) of two sequences by the length of the longer one."""
    row = list(range(len(second) + 1))
    for number, each in enumerate(first, 1):
        before, row[0] = row[0], number
        for place, call in enumerate(second, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (each != call))
    return 1 - row[-1] / max(1, len(first), len(second))


def rows_of(runs: Runs, share: float, unequal: bool) -> Iterator[Row]:
    figures = defaultdict[str, list[tuple[float, float]]](list)
    for seed in range(_SHUFFLES):
        chance = np.random.default_rng(seed)
        first, second = halves(runs, chance, unequal)
        domains = {name: first[runs.domains[first] == name] for name in np.unique(runs.domains[first])}
        for name, way in ways(runs, first, chance).items():
            chosen = [place for places in domains.values() for place in way(places, round(share * len(places)))]
            figures[name].append(measured(runs, first, second, chosen))
    base = np.array(figures["random successes"])
    for name, values in figures.items():
        more = np.array(values) - base
        errors = more.std(axis=0, ddof=1) / np.sqrt(len(more))
        solved, edit = np.array(values).mean(axis=0)
        row: Row = {"set": runs.name, "share": share, "unequal": unequal, "way": name, "solved": solved, "edit": edit}
        yield (
            row
            | dict(zip(("solved_more", "edit_more"), more.mean(axis=0), strict=True))
            | dict(zip(("solved_error", "edit_error"), errors, strict=True))
        )


def main() -> None:
    options = arguments(__doc__, share=0.1, unequal=0).parse_args()
    files = sorted((REFERENCE_TRACES / "sets").glob("*.jsonl.gz"))
    if not files:
        sys.exit(f"there are no sets in {REFERENCE_TRACES / 'sets'}; name the folder above with REFERENCE_TRACES")
    report("value", (row for file in files for row in rows_of(read_runs(file), options.share, bool(options.unequal))))


if __name__ == "__main__":
    main()
