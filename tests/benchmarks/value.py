"""Measures the value of a kept share of runs to later runs, compared with the same number of random successes.

Reads sets of runs with several runs per task: NAME.jsonl.gz, and NAME.tasks.json.gz, which maps the id of each run to its task.
Each shuffle halves the runs of each task, keeps a share of the first half by domain, and measures on the second half; the
differences are to random successes:

  solved  of the runs whose task was solved in the first half, the share for which a solved run of the task was kept
  calls   of a successful run's calls, the share with the same name as the nearest call of the kept runs; calls are compared by
          the objective, by what came since the call before, and by that call's name
  edit    the similarity (1 - normalised edit distance) of a successful run's calls to those of the kept run with the nearest
          objective by its characters, which is not how the runs are chosen

Tasks recur in three ways: equally; unequally, as in life, where the share of a task's runs that count falls as (r+1)^-0.7 with
its rank r; or as recorded, where the second half of all runs came after the first. Domains in which the share takes nearly
every success are left out.
"""

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
from kp_scorer import score_traces
from kp_scorer.coverage import Coverage, Vectors
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.gate import Gate, GateBounds, GatePolicy, MemoryFacts
from kp_scorer.limits import Limits
from kp_scorer.settings import load_settings
from kp_scorer.trace import ReasoningTrace
from numpy.typing import NDArray

from tests.benchmarks.common import Row, arguments, report, show_table
from tests.support.paths import REFERENCE_TRACES

RECURRENCES: Final = ("equally", "unequally", "as recorded")
MEASURES: Final = ("solved", "calls", "edit")
ONE_AT_A_TIME: Final = "one at a time"
_FEWEST: Final = 3  # A share of fewer runs is not measured.
_NEAR_COPY: Final = 0.7
_DIMENSIONS: Final = 4_096
_SHELLS: Final = ("", "bash", "sh", "shell", "execute", "command", "run")

Places = NDArray[np.intp]
Way = Callable[[Places, int], Sequence[int]]
"""A way to keep runs: it takes the places of one domain's runs and a number, and returns at most that many of them."""


class Runs(NamedTuple):
    """A set of runs, with the measurements of each."""

    name: str
    traces: Sequence[ReasoningTrace]
    tasks: Sequence[str]
    succeeded: NDArray[np.bool]
    domains: NDArray[np.str_]
    words: Vectors
    characters: Vectors  # The vectors of the objectives by their characters.
    calls: Sequence[Sequence[str]]
    before_calls: Sequence[Vectors]  # For each run, the context before each of its calls, of shape (calls, dimensions).


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
        [_before_calls(trace, embedder) for trace in traces],
    )


def _characters(text: str) -> NDArray[np.float32]:
    """Count a text's sequences of four characters by their hashes; return a unit vector of shape (4096,)."""
    columns = [crc32(text[at : at + 4].lower().encode()) % _DIMENSIONS for at in range(max(1, len(text) - 3))]
    counts = np.log1p(np.bincount(columns, minlength=_DIMENSIONS)).astype(np.float32)
    unit: NDArray[np.float32] = counts / np.linalg.norm(counts)
    return unit


def _calls(trace: ReasoningTrace) -> Iterator[str]:
    for step in trace.steps:
        if step.type == "tool_call":
            name = step.tool.name if step.tool else ""
            # For a shell, the program that it runs tells what was done.
            yield f"{name}:{(step.content or '?').split()[0]}" if name in _SHELLS and (step.content or "").split() else name


def _before_calls(trace: ReasoningTrace, embedder: WordsEmbedder) -> Vectors:
    """Embed, for each call, the objective, what came since the last call, and that call's name, and join the vectors."""
    since, last, texts = "", "", list[str]()
    names = _calls(trace)
    for step in trace.steps:
        if step.type == "tool_call":
            texts += [since[-800:], f"called {last}"]
            since, last = "", next(names)
        else:
            since += f" {step.content or ''}"
    asked = np.repeat(embedder.embed([trace.task.objective[:1_500]]), len(texts) // 2, axis=0)
    parts = embedder.embed(texts)
    return np.concatenate([0.7 * asked, parts[::2], 1.5 * parts[1::2]], axis=1)


def halves(runs: Runs, chance: np.random.Generator, recurrence: str) -> tuple[Places, list[int]]:
    if recurrence == "as recorded":
        order = sorted(range(len(runs.traces)), key=lambda place: runs.traces[place].metadata.created_at)
        return np.array(order[: len(order) // 2], np.intp), order[len(order) // 2 :]
    by_task = defaultdict[str, list[int]](list)
    for place in chance.permutation(len(runs.traces)):
        by_task[runs.tasks[place]].append(int(place))
    first: list[int] = []
    second: list[int] = []
    for rank, task in enumerate(chance.permutation(sorted(by_task))):
        places = by_task[str(task)]
        if recurrence == "unequally":
            share = min(1.0, (0.02 * len(by_task) + 1) / (rank + 1) ** 0.7 * 1.6)
            places = places[: max(1, round(len(places) * share))]
        half = len(places) // 2
        first += places[:half]
        second += places[half : 2 * half]
    return chance.permutation(np.array(first, np.intp)), second


def ways(runs: Runs, first: Places, chance: np.random.Generator) -> dict[str, Way]:
    settings = load_settings({"embedding.embedder": "words"})
    decisions = score_traces([runs.traces[place] for place in first], settings)
    scores = {place: decision.score for place, decision in zip(first.tolist(), decisions, strict=True)}
    objectives = [trace.task.objective for trace in runs.traces]

    def successes(places: Places) -> list[int]:
        return [int(place) for place in chance.permutation(places[runs.succeeded[places]])]

    def without(is_copy: Callable[[int, list[int]], bool]) -> Way:
        def way(places: Places, most: int) -> list[int]:
            members: list[int] = []
            copies: list[int] = []
            for place in successes(places):
                (copies if is_copy(place, members) else members).append(place)
            return [*members, *copies][:most]

        return way

    def spread(places: Places, most: int) -> list[int]:
        """Take, one after the other, the success that is least similar to those already taken (k-center)."""
        from_all = np.array(successes(places))
        members, nearest = [0], runs.words[from_all] @ runs.words[from_all[0]]
        while len(members) < min(most, len(from_all)):
            members.append(int(nearest.argmin()))
            nearest = np.maximum(nearest, runs.words[from_all] @ runs.words[from_all[members[-1]]])
        return [int(place) for place in from_all[members]]

    def covering(places: Places, most: int) -> list[int]:
        chosen = Coverage(runs.words[:0]).choose(runs.words[places], runs.succeeded[places].tolist(), most)
        return [int(places[run.place]) for run in chosen]

    def one_at_a_time(places: Places, most: int) -> list[int]:
        facts, chosen = MemoryFacts(), list[int]()
        bounds, policy = GateBounds(len(places), 10**12), GatePolicy(most / len(places))
        gate = Gate(facts, runs.words.shape[1], bounds, policy)
        for place in places.tolist():
            gate.catch_up()
            batch, succeeded = gate.weigh([(str(place), "any", runs.words[place])]), bool(runs.succeeded[place])
            weighed = batch.weigh(0, succeeded, 1.0)
            chosen += [place] * (is_kept := succeeded and weighed.adds >= weighed.bar)
            facts.append(str(place), "any", batch.settle(0, is_eligible=succeeded, is_kept=is_kept).packed())
        return chosen

    return {
        "random successes": lambda places, most: successes(places)[:most],
        "any at random": lambda places, most: chance.permutation(places)[:most].tolist(),
        "score": lambda places, most: sorted(places.tolist(), key=lambda place: -scores[place])[:most],
        "one of each objective": without(lambda place, members: objectives[place] in [objectives[each] for each in members]),
        "near copies left out": without(
            lambda place, members: bool(members) and (runs.words[members] @ runs.words[place]).max() >= _NEAR_COPY
        ),
        "k-center": spread,
        "coverage": covering,
        ONE_AT_A_TIME: one_at_a_time,
    }


class Later:
    """The second half of the runs, on which the runs kept of the first half are measured."""

    def __init__(self, runs: Runs, first: Places, second: Sequence[int]) -> None:
        self._runs = runs
        solved_tasks = {runs.tasks[place] for place in first if runs.succeeded[place]}
        self._solved = [runs.tasks[place] for place in second if runs.tasks[place] in solved_tasks]
        self._tested = [place for place in second if runs.succeeded[place] and runs.calls[place]]
        # Compare each pair of calls only once, for all ways and shares.
        with_calls = [int(place) for place in first if runs.calls[place]]
        ends = np.cumsum([0, *(len(runs.calls[place]) for place in with_calls)])
        self._columns = {place: np.arange(ends[at], ends[at + 1]) for at, place in enumerate(with_calls)}
        self._names = np.array([name for place in with_calls for name in runs.calls[place]])
        calls = np.concatenate([runs.before_calls[place] for place in with_calls])
        self._likenesses = [runs.before_calls[place] @ calls.T for place in self._tested]

    def measured(self, chosen: Sequence[int]) -> tuple[float, ...]:
        """Return the three measures of the chosen runs, or NaN if they cannot be measured."""
        runs = self._runs
        won = {runs.tasks[place] for place in chosen if runs.succeeded[place]}
        solved = [task in won for task in self._solved]
        kept_runs = [place for place in chosen if place in self._columns]
        if not (kept_runs and self._tested and solved):
            return (np.nan,) * len(MEASURES)
        columns = np.concatenate([self._columns[place] for place in kept_runs])
        named = [self._names[columns][likeness[:, columns].argmax(axis=1)] for likeness in self._likenesses]
        calls = [np.mean(names == runs.calls[place]) for names, place in zip(named, self._tested, strict=True)]
        nearest = (runs.characters[self._tested] @ runs.characters[kept_runs].T).argmax(axis=1)
        edits = [_likeness(runs.calls[each], runs.calls[kept_runs[at]]) for each, at in zip(self._tested, nearest, strict=True)]
        return float(np.mean(solved)), float(np.mean(calls)), float(np.mean(edits))


def _likeness(first: Sequence[str], second: Sequence[str]) -> float:
    """Return 1 minus the Levenshtein distance of two sequences, normalised by the length of the longer one."""
    row = list(range(len(second) + 1))
    for number, each in enumerate(first, 1):
        before, row[0] = row[0], number
        for place, call in enumerate(second, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (each != call))
    return 1 - row[-1] / max(1, len(first), len(second))


def rows_of(runs: Runs, shares: Sequence[float], shuffles: int, recurrence: str) -> Iterator[Row]:
    figures, bases = (defaultdict[tuple[float, str], list[tuple[float, ...]]](list) for _ in range(2))
    for seed in range(shuffles):
        chance = np.random.default_rng(seed)
        first, second = halves(runs, chance, recurrence)
        domains = [first[runs.domains[first] == name] for name in np.unique(runs.domains[first])]
        later = Later(runs, first, second)
        by_name = ways(runs, first, chance)
        for name, way in by_name.items():
            for share in shares:
                numbers = [round(share * len(places)) for places in domains]
                choosable = [
                    runs.succeeded[places].sum() > 1.05 * most > 0 for places, most in zip(domains, numbers, strict=True)
                ]
                if sum(np.array(numbers)[choosable]) >= _FEWEST:
                    of_all = zip(domains, numbers, choosable, strict=True)
                    chosen = [(places, way(places, most)) for places, most, is_one in of_all if is_one]
                    figures[share, name].append(later.measured([place for _, places in chosen for place in places]))
                    base = figures[share, "random successes"][-1]
                    if name == ONE_AT_A_TIME:
                        # This way keeps somewhat more or fewer runs than were asked for, which affects the value by itself.
                        at_random = [by_name["random successes"](places, len(each)) for places, each in chosen]
                        base = later.measured([place for places in at_random for place in places])
                    bases[share, name].append(base)
    for (share, name), values in figures.items():
        more = np.array(values) - np.array(bases[share, name])
        errors = more.std(axis=0, ddof=1) / np.sqrt(len(more))
        row: Row = {"set": runs.name, "recurrence": recurrence, "share": share, "way": name}
        for measure, mean, difference, error in zip(MEASURES, np.mean(values, axis=0), more.mean(axis=0), errors, strict=True):
            row |= {measure: float(mean), f"{measure}_more": float(difference), f"{measure}_error": float(error)}
        yield row


def summarised(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the means over sets, their errors, and the numbers of sets in which a way is better and worse by two errors."""
    groups = defaultdict[tuple[Any, ...], list[Row]](list)
    for row in rows:
        groups[row["recurrence"], row["share"], row["way"]].append(row)
    for (recurrence, share, name), of_sets in groups.items():
        summary: Row = {"set": f"all {len(of_sets)}", "recurrence": recurrence, "share": share, "way": name}
        for measure in MEASURES:
            more, errors = (np.array([row[f"{measure}_{kind}"] for row in of_sets]) for kind in ("more", "error"))
            error = more.std(ddof=1) / np.sqrt(len(more)) if len(more) > 1 else errors[0]
            better, worse = (more > 2 * errors).sum(), (more < -2 * errors).sum()
            summary[measure] = f"{more.mean():+.3f} ± {error:.3f} ({better}/{worse})"
        yield summary


def main() -> None:
    options = arguments(__doc__, shuffles=8, percent=[2, 5, 10, 20]).parse_args()
    files = sorted((REFERENCE_TRACES / "sets").glob("*.jsonl.gz"))
    if not files:
        sys.exit(f"there are no sets in {REFERENCE_TRACES / 'sets'}; name the folder above with REFERENCE_TRACES")
    shares = [percent / 100 for percent in options.percent]
    rows = [
        row
        for runs in map(read_runs, files)
        for recurrence in RECURRENCES
        for row in rows_of(runs, shares, options.shuffles, recurrence)
        if not np.isnan(row["solved"])
    ]
    report("value", rows)
    show_table(list(summarised(rows)))


if __name__ == "__main__":
    main()
