"""Gathers decisions for a command, from a file of them, a file of traces to score, or the ledger."""

import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from typing import Any, Final, NamedTuple

import click

from kp_scorer.characters import escaped
from kp_scorer.cli.converting import Batches, Line
from kp_scorer.cli.display import counted, note_if_unmeasured, progress
from kp_scorer.cli.input import read_traces
from kp_scorer.cli.options import Command, ledger_options, since_option
from kp_scorer.cli.output import note_damaged, print_note, refusal
from kp_scorer.cli.unpacking import lines_in, open_input, read_bytes, unpacked
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, ScorerError, TraceConflict, TraceDead
from kp_scorer.limits import Limits
from kp_scorer.offline import decide_offline, offline_decider
from kp_scorer.report.drift import time_of
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.trace import ReasoningTrace, namespace_of

_MOST_BYTES: Final = 2**20  # The longest line with a decision, which takes some two kilobytes.
_FILTERS: Final = ("since", "domain", "namespace", "agent")


Result = Decision | InvalidTrace | TraceConflict | TraceDead  # The decision on a trace, or the reason why there is none.


class GatheredTrace(NamedTuple):
    """A decision with the label of its trace; and the trace, which takes more memory, if a file of traces was read."""

    decision: Decision  # The first decision, because a label judges by what was known then.
    label: bool | None = None  # From --labels if that is given, otherwise from the ledger or from the output of `status`.
    trace: ReasoningTrace | None = None  # None unless a file of traces was read.
    revision: Decision | None = None  # The newest decision, if late outcomes have led to another.
    task: str = ""  # The result of :func:`task_of`, if a file of traces was read.


@dataclass(slots=True)
class Gathered:
    """Decisions, and figures about their sources."""

    source: str
    traces: Iterable[GatheredTrace] = ()  # To be read once: in the order of the file, or of the log if it is a sample.
    refused: int = 0  # The lines without trace or decision, or damaged records in the ledger; complete once all are read.
    are_of_domains: bool = False  # True if --domain has chosen some domains.
    kind: str = "decisions"  # The word for the decisions in errors.
    labels: Mapping[str, bool] | None = None  # From --labels, by trace id.
    is_stored: bool = False  # True if the ledger is read.
    dead_letters: int = 0  # The number of dead letters, of all producers; 0 unless the ledger was read.

    def filter(self, option: str, values: Collection[str], is_chosen: Callable[[Decision], bool]) -> None:
        """Keep only the decisions that match one of an option's values; without values, keep all."""
        if values:
            problem = f"there are no {self.kind} in {self.source} with {option} {' or '.join(map(repr, values))}"
            self.traces = _some((each for each in self.traces if is_chosen(each.decision)), escaped(problem))
            self.dead_letters = 0


def gathering_options(command: Command, sample: int | None = None, *, only_labelled: bool = False) -> Command:
    """Add the options that choose decisions, and pass the command the ``settings`` and the ``gathered`` decisions.

    ``sample`` is the default of --sample. If the command has --labels, these replace the labels of the ledger. With
    ``only_labelled``, decisions without a label are left out, and not even read from the ledger. Reading the decisions raises
    ScorerError if there is none. The exit code is 1 if a line held neither a trace nor a decision.
    """
    filter_option = partial(click.option, multiple=True)

    @click.argument("file", metavar="[FILE|-]", type=click.Path(allow_dash=True), required=False)
    @click.option("--stored", is_flag=True, help="Read the decisions in the ledger instead of FILE.")
    @click.option(
        "--sample",
        type=click.IntRange(min=1),
        default=sample,
        show_default=True,
        help="With --stored, read at most this many records, chosen at random.",
    )
    @since_option
    @filter_option("--domain", metavar="NAME", help="Only traces submitted with this domain; repeatable.")
    @filter_option("--namespace", metavar="NAME", help="Only traces with this namespace in their id; '' for none; repeatable.")
    @filter_option("--agent", metavar="ID", help="Only traces with this metadata.agent_id; '' for none; repeatable.")
    @ledger_options
    @wraps(command)
    def with_decisions(file: str | None, stored: bool, sample: int | None, settings: Settings, **kwargs: Any) -> int:
        if stored == (file is not None):
            raise click.UsageError("expected either FILE, of traces or of decisions, or --stored")
        labels, filters = kwargs.pop("labels", None), {name: kwargs.pop(name) for name in _FILTERS}
        if file is None:
            settings = with_endpoints(settings)
            gathered = _gather_stored(settings, sample, labels, only_labelled=only_labelled)
        else:
            gathered = gather_file(file, settings)
        _choose(gathered, labels, filters, only_labelled=only_labelled)
        return command(gathered=gathered, settings=settings, **kwargs) or gathered.refused > 0

    return with_decisions


def _choose(gathered: Gathered, labels: Mapping[str, bool] | None, filters: Mapping[str, Any], *, only_labelled: bool) -> None:
    since, domains, namespaces, agents = (filters[name] for name in _FILTERS)
    gathered.labels, gathered.are_of_domains = labels, bool(domains)
    if labels is not None:
        gathered.traces = (each._replace(label=labels.get(each.decision.trace_id)) for each in gathered.traces)
    if only_labelled:
        gathered.kind = "decisions with a label"
        gathered.traces = (each for each in gathered.traces if each.label is not None)
    gathered.traces = _some(gathered.traces, f"there are no {gathered.kind} in {gathered.source}")
    first_s, times = (since.timestamp(), [f"{since:%F %T}"]) if since else (0.0, [])
    gathered.filter("--since", times, lambda decision: time_of(decision).timestamp() >= first_s)
    gathered.filter("--domain", domains, lambda decision: decision.domain in domains)
    gathered.filter("--namespace", namespaces, lambda decision: namespace_of(decision.trace_id) in namespaces)
    gathered.filter("--agent", agents, lambda decision: (decision.agent_id or "") in agents)


def _some(traces: Iterable[GatheredTrace], problem: str) -> Iterator[GatheredTrace]:
    """Yield the traces; raise ScorerError if there are none."""
    trace = None
    for trace in traces:
        yield trace
    if trace is None:
        raise ScorerError(problem)


def gather_file(name: str, settings: Settings) -> Gathered:
    """Gather the decisions in a file, or score the traces in it; ``-`` is standard input."""
    gathered = Gathered(name)
    gathered.traces = _in_file(gathered, settings)
    return gathered


def _in_file(gathered: Gathered, settings: Settings) -> Iterator[GatheredTrace]:
    with open_input(gathered.source) as opened:
        stream = unpacked(opened)
        # A decision is as `score`, `decisions` or `status` prints it; a trace has an @type.
        beginning = read_bytes(stream.peek, 1).lstrip().partition(b"\n")[0]
        if b'"trace_id"' in beginning and b'"@type"' not in beginning:
            yield from _read_decisions(stream, gathered)
        else:
            yield from _score(stream, gathered, settings)


def traces_named(name: str | None, decisions: Collection[Decision], limits: Limits) -> dict[str, ReasoningTrace]:
    """Return by id the traces of decisions, and those nearest to them, as far as a file contains them."""
    if name is None:
        return {}
    wanted = {decision.trace_id for decision in decisions}
    wanted |= {decision.novelty.nearest.trace_id for decision in decisions if decision.novelty.nearest}
    with open_input(name) as stream:
        # Read the traces one by one, as the file may be of any size.
        traces = (line.trace for line in read_traces(stream, limits))
        return {trace.id: trace for trace in traces if not isinstance(trace, InvalidTrace) and trace.id in wanted}


def task_of(trace: ReasoningTrace, document: Mapping[str, Any]) -> str:
    """Return the task of a run: its ``metadata.task``, or else its objective."""
    task = document["metadata"].get("task")
    return str(task) if isinstance(task, str | int) and task != "" else trace.task.objective


def score_lines(batches: Batches, settings: Settings) -> Iterator[tuple[Line, Result]]:
    """Score the traces of an input in order; the embedder is loaded with the first batch."""
    decider: Decider | None = None
    for batch in counted(batches, "scored"):
        decider = decider or offline_decider(settings)
        results = decide_offline(decider, [line.trace for line in batch if not isinstance(line.trace, InvalidTrace)])
        for line in batch:
            result = line.trace if isinstance(line.trace, InvalidTrace) else next(results)
            # Each trace has a result, because a ledger in memory has no other worker that could hold it.
            assert isinstance(result, Result)
            if isinstance(result, Decision):
                note_if_unmeasured(result)
            yield line, result


def look_up_lines(batches: Batches, settings: Settings) -> Iterator[tuple[Line, Result | str]]:
    """Look up the decisions on the traces of an input, in order, or the states of those without one."""
    with Store.open(with_endpoints(settings)) as store:
        for batch in batches:
            traces = [line.trace for line in batch if isinstance(line.trace, ReasoningTrace)]
            records = store.ledger.look_up([trace.id for trace in traces])
            for line, trace, record in zip(batch, traces, records, strict=True):
                if record and record.digest != trace.digest():
                    yield line, TraceConflict(trace.id)
                else:
                    yield line, (record.decision or record.state) if record else "unknown"


def _score(stream: io.BufferedReader, gathered: Gathered, settings: Settings) -> Iterator[GatheredTrace]:
    scored_ids: set[str] = set()
    lines = read_traces(stream, settings.limits)
    batches = iter(lambda: list(islice(lines, settings.worker.batch_size)), [])
    for line, result in score_lines(batches, settings):
        if not isinstance(result, Decision):
            gathered.refused += 1
            refusal(line.number, result)
        elif result.trace_id not in scored_ids and isinstance(line.trace, ReasoningTrace):
            scored_ids.add(result.trace_id)
            yield GatheredTrace(result, trace=line.trace, task=task_of(line.trace, line.document))


def _gather_stored(settings: Settings, most: int | None, labels: Mapping[str, bool] | None, *, only_labelled: bool) -> Gathered:
    """Gather all decisions in the ledger as they are read, or those of ``most`` random records, in the log's order."""
    gathered = Gathered("the ledger", is_stored=True)
    with Store.open(settings) as store:
        gathered.dead_letters = store.dead_letters.count()
        sample, records = store.ledger.sample(most) if most else (None, 0)
        chosen: Collection[str] | None = sample
        if only_labelled:
            chosen = list(store.ledger.labelled(sample)) if labels is None else labels.keys() & (sample or labels)
    gathered.traces = _stored(settings, chosen, gathered)
    if sample is not None:
        gathered.traces = sorted(gathered.traces, key=lambda each: _place(each.decision))
        if len(sample) < records:
            gathered.source = f"a sample of {len(sample):,} of {records:,} records in the ledger"
            print_note(f"{gathered.source}, chosen at random; --sample takes more")
    return gathered


def has_stored_labels(settings: Settings, labels: Mapping[str, bool] | None) -> bool:
    """Return whether any trace in the ledger has a label, by ``labels`` or, if that is None, by the ledger."""
    with Store.open(settings) as store:
        labelled = store.ledger.labelled() if labels is None else store.ledger.all_decided(labels)
        return next(labelled, None) is not None


def _stored(settings: Settings, chosen: Collection[str] | None, gathered: Gathered) -> Iterator[GatheredTrace]:
    with Store.open(settings) as store, progress("read") as advance:
        total = store.ledger.counts().decided if chosen is None else len(chosen)
        for count, stored in enumerate(store.ledger.all_decided(chosen), 1):
            advance(count, max(total, count))
            revision = stored.decision if stored.first else None
            yield GatheredTrace(stored.first or stored.decision, stored.good, revision=revision)
        gathered.refused = note_damaged(store.ledger.damaged)


def _place(decision: Decision) -> tuple[float, int]:
    """Return a sort key for the order of the traces: the place in the log, or the time of a decision without one, in ms."""
    time_ms, _, number = (decision.novelty.entry or "").partition("-")
    return (int(time_ms), int(number)) if number else (time_of(decision).timestamp() * 1_000, 0)


def _read_decisions(stream: io.BufferedReader, gathered: Gathered) -> Iterator[GatheredTrace]:
    """Read decisions, each once, as any command prints them; count the lines without one."""
    decisions: dict[str, Decision] = {}
    labels: dict[str, bool] = {}
    for number, line in lines_in(stream, _MOST_BYTES):
        try:
            row = json.loads(line)
            decision = Decision.model_validate(row.get("decision", row))
        except (ValueError, AttributeError, RecursionError):
            gathered.refused += 1
            print_note(f"line {number}: expected a decision, as one JSON object")
        else:
            # A trace that was forgotten and submitted again has two decisions. The ledger holds the later one.
            earlier = decisions.get(decision.trace_id, decision)
            decisions[decision.trace_id] = max(earlier, decision, key=lambda each: each.decided_at)
            if isinstance(good := row.get("good"), bool):
                labels[decision.trace_id] = good
    for trace_id, decision in decisions.items():
        yield GatheredTrace(decision, labels.get(trace_id))
