"""Decisions for a command to look at: those that a file holds, those that its traces get offline, or those of the ledger."""

import io
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import IO, Any, Final, NamedTuple

import click

from kp_scorer.characters import escaped
from kp_scorer.cli.converting import Line
from kp_scorer.cli.display import progress
from kp_scorer.cli.input import open_input, read_bytes, read_traces, unpacked
from kp_scorer.cli.options import Command, ledger_options
from kp_scorer.cli.output import note_damaged, note_if_unmeasured, print_note, refusal
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, ScorerError, TraceConflict
from kp_scorer.ledger import Store
from kp_scorer.offline import decide_offline, offline_decider
from kp_scorer.settings import Settings
from kp_scorer.trace import ReasoningTrace, namespace_of

_MOST_BYTES: Final = 2**20  # Of a line with a decision, which takes some two kilobytes.


class GatheredTrace(NamedTuple):
    """A decision, and whether its trace is good."""

    decision: Decision
    label: bool | None = None  # As the ledger holds it, or as `status` printed it; None if it has none.
    success: bool | None = None  # Whether it succeeded; None unless a file of traces was read.


@dataclass(slots=True)
class Gathered:
    """Decisions with what goes with them."""

    traces: Iterable[GatheredTrace]
    """To be read once. Of a file in its order, and of a sample of the ledger in that of the log; else in none."""
    source: str
    refused: int = 0
    """How many lines held neither a trace nor a decision, or how many records of the ledger are damaged; once all are read."""
    dead_letters: int = 0  # How many there are, of all producers; 0 unless the ledger was read.

    def only(self, option: str, names: Collection[str], name_of: Callable[[Decision], str]) -> None:
        """Leave out what an option that chooses names does not name."""
        chosen = (each for each in self.traces if name_of(each.decision) in names)
        problem = f"there are no decisions in {self.source} with {option} {' or '.join(map(repr, names))}"
        self.traces, self.dead_letters = _some(chosen, escaped(problem)), 0


def gathering_options(command: Command, sample: int | None = None) -> Command:
    """Add the options that choose the decisions, and pass a command the ``settings`` and what is ``gathered``.

    ``sample`` is the default of --sample. Whoever reads the decisions gets a ScorerError if there is none; exits 1 after the
    command if a line holds neither a trace nor a decision.
    """

    @click.argument("file", metavar="[FILE|-]", type=click.Path(allow_dash=True), required=False)
    @click.option("--stored", is_flag=True, help="Use the decisions that the ledger holds, in place of a file.")
    @click.option(
        "--sample",
        type=click.IntRange(min=1),
        default=sample,
        show_default=True,
        help="With --stored, read so many records, chosen at random.",
    )
    @click.option("--namespace", metavar="NAME", multiple=True, help="Only traces with this namespace in their id; none: ''.")
    @click.option("--agent", metavar="ID", multiple=True, help="Only traces with this metadata.agent_id; none: ''.")
    @ledger_options
    @wraps(command)
    def with_decisions(
        *args: Any,
        file: str | None,
        stored: bool,
        sample: int | None,
        namespace: tuple[str, ...],
        agent: tuple[str, ...],
        settings: Settings,
        **kwargs: Any,
    ) -> None:
        if stored == (file is not None):
            raise click.UsageError("expected either FILE, of traces or of decisions, or --stored")
        settings = with_endpoints(settings) if file is None else settings
        gathered = _gather_stored(settings, sample) if file is None else gather_file(file, settings)
        gathered.traces = _some(gathered.traces, f"there are no decisions in {gathered.source}")
        if namespace:
            gathered.only("--namespace", namespace, lambda decision: namespace_of(decision.trace_id))
        if agent:
            gathered.only("--agent", agent, lambda decision: decision.agent_id or "")
        if file is not None:
            gathered.traces = list(gathered.traces)
        command(*args, gathered=gathered, settings=settings, **kwargs)
        if gathered.refused:
            sys.exit(1)

    return with_decisions


def _some(traces: Iterable[GatheredTrace], problem: str) -> Iterator[GatheredTrace]:
    """Yield what there is; raise ScorerError if that is nothing."""
    trace = None
    for trace in traces:
        yield trace
    if trace is None:
        raise ScorerError(problem)


def gather_file(name: str, settings: Settings, traces: dict[str, ReasoningTrace] | None = None) -> Gathered:
    """Gather the decisions that a file holds, or those that its traces get; ``-`` is standard input.

    The traces themselves are held only in ``traces``, if it is given, by id.
    """
    with open_input(name) as opened:
        stream = unpacked(opened)
        if _holds_decisions(stream):
            return _read_decisions(stream, name)
        return _score(stream, name, settings, traces)


def traces_named(name: str | None, decisions: Collection[Decision], limits: Limits) -> dict[str, ReasoningTrace]:
    """The traces that decisions are about, and the nearest to them, by id, as far as a file has them."""
    if name is None:
        return {}
    wanted = {decision.trace_id for decision in decisions}
    wanted |= {decision.novelty.nearest.trace_id for decision in decisions if decision.novelty.nearest}
    with open_input(name) as stream:
        # One by one: it may be a file of any size.
        traces = (line.trace for line in read_traces(stream, limits))
        return {trace.id: trace for trace in traces if not isinstance(trace, InvalidTrace) and trace.id in wanted}


def score_lines(
    batches: Iterable[Sequence[Line]], settings: Settings
) -> Iterator[tuple[Line, Decision | InvalidTrace | TraceConflict]]:
    """Score the traces on lines of an input, in order; the embedder is loaded with the first batch."""
    decider: Decider | None = None
    done = 0
    with progress("scored") as advance:
        for batch in batches:
            decider = decider or offline_decider(settings)
            results = decide_offline(decider, [line.trace for line in batch if not isinstance(line.trace, InvalidTrace)])
            for line in batch:
                result = line.trace if isinstance(line.trace, InvalidTrace) else next(results)
                # A ledger in memory has no other workers and no deaths.
                assert isinstance(result, Decision | InvalidTrace | TraceConflict)
                if isinstance(result, Decision):
                    note_if_unmeasured(result)
                yield line, result
            done += len(batch)
            advance(done, None)


def _score(stream: IO[bytes], name: str, settings: Settings, traces: dict[str, ReasoningTrace] | None) -> Gathered:
    gathered: dict[str, GatheredTrace] = {}
    refused = 0
    lines = read_traces(stream, settings.limits)
    batches = iter(lambda: list(islice(lines, settings.worker.batch_size)), [])
    for line, result in score_lines(batches, settings):
        if isinstance(result, Decision) and not isinstance(line.trace, InvalidTrace):
            gathered.setdefault(result.trace_id, GatheredTrace(result, success=line.trace.metadata.success))
            if traces is not None:
                traces[result.trace_id] = line.trace
        elif not isinstance(result, Decision):
            refused += 1
            refusal(line.number, result)
    return Gathered(gathered.values(), name, refused)


def _gather_stored(settings: Settings, most: int | None) -> Gathered:
    """Gather what the ledger holds: as it is read, or of ``most`` records at once and in their order."""
    gathered = Gathered((), "the ledger")
    with Store.open(settings) as store:
        gathered.dead_letters = store.dead_letters.count()
        sample, records = store.ledger.sample(most) if most else (None, 0)
    gathered.traces = _stored(settings, sample, gathered)
    if sample is not None:
        gathered.traces = sorted(gathered.traces, key=lambda each: _place(each.decision))
        if len(sample) < records:
            gathered.source = f"a sample of {len(sample):,} of {records:,} records in the ledger"
            print_note(f"{gathered.source}, chosen at random; --sample takes more")
    return gathered


def _stored(settings: Settings, sample: Sequence[str] | None, gathered: Gathered) -> Iterator[GatheredTrace]:
    with Store.open(settings) as store, progress("read") as advance:
        total = store.ledger.counts().decided if sample is None else len(sample)
        for count, stored in enumerate(store.ledger.all_decided(sample), 1):
            advance(count, max(total, count))
            yield GatheredTrace(stored.decision, stored.good)
        gathered.refused = note_damaged(store.ledger.damaged)


def _place(decision: Decision) -> tuple[float, int]:
    """Orders decisions as their traces came: the place in the log, or the time of a decision without one; in ms."""
    time_ms, _, number = (decision.novelty.entry or "").partition("-")
    return (int(time_ms), int(number)) if number else (datetime.fromisoformat(decision.decided_at).timestamp() * 1_000, 0)


def _holds_decisions(stream: io.BufferedReader) -> bool:
    """Whether the first line is one that `score`, `decisions` or `status` prints, and no trace."""
    beginning = read_bytes(stream.peek, 1).lstrip().partition(b"\n")[0]
    return b'"trace_id"' in beginning and b'"@type"' not in beginning


def _read_decisions(stream: IO[bytes], name: str) -> Gathered:
    """Read decisions, each once, also as `submit --wait` and `status` print them; count the lines without one."""
    decisions: dict[str, Decision] = {}
    labels: dict[str, bool] = {}
    refused = 0
    lines = iter(lambda: read_bytes(stream.readline, _MOST_BYTES), b"")
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
            decision = Decision.model_validate(row.get("decision", row))
        except (ValueError, AttributeError, RecursionError):
            refused += 1
            print_note(f"line {number}: expected a decision, as one JSON object")
        else:
            # Of a trace that was forgotten and submitted again, the ledger has the later one.
            earlier = decisions.get(decision.trace_id, decision)
            decisions[decision.trace_id] = max(earlier, decision, key=lambda each: each.decided_at)
            if isinstance(good := row.get("good"), bool):
                labels[decision.trace_id] = good
    traces = [GatheredTrace(decision, labels.get(trace_id)) for trace_id, decision in decisions.items()]
    return Gathered(traces, name, refused)
