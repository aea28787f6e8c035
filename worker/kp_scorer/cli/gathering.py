"""Decisions for a command to look at: those that a file holds, those that its traces get offline, or those of the ledger."""

import io
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import IO, Any, Final, NamedTuple, Self

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
from kp_scorer.errors import InvalidTrace, ScorerError, TraceConflict
from kp_scorer.ledger import Store
from kp_scorer.local.endpoints import with_endpoints
from kp_scorer.offline import decide_offline, offline_decider
from kp_scorer.settings import Settings
from kp_scorer.trace import ReasoningTrace, namespace_of

_MOST_BYTES: Final = 2**20
"""Of a line with a decision, which takes some two kilobytes."""


class Gathered(NamedTuple):
    """Decisions with what goes with them."""

    decisions: list[Decision]
    """Of a file in its order; of the ledger by their places in the novelty log, or the times of their decisions."""
    successes: Mapping[str, bool]
    """Whether each trace succeeded, by id; empty unless a file of traces was read."""
    dead_letters: int
    """How many there are, of all producers; 0 unless the ledger was read."""
    refused: int
    """How many lines held neither a trace nor a decision, or how many records of the ledger are damaged."""
    source: str
    labels: Mapping[str, bool]
    """Whether a trace is good, by id: those that the ledger holds, or that `status` printed."""

    def only(self, option: str, names: Collection[str], name_of: Callable[[Decision], str]) -> Self:
        """What is left of them by an option that chooses names."""
        if chosen := [decision for decision in self.decisions if name_of(decision) in names]:
            return self._replace(decisions=chosen, dead_letters=0)
        raise ScorerError(escaped(f"there are no decisions in {self.source} with {option} {' or '.join(map(repr, names))}"))


def gathering_options(command: Command) -> Command:
    """Add the options that choose the decisions, and pass a command the ``settings`` and what is ``gathered``.

    Raises ScorerError if there is no decision; exits 1 after the command if a line holds neither a trace nor a decision.
    """

    @click.argument("file", metavar="[FILE|-]", type=click.Path(allow_dash=True), required=False)
    @click.option("--stored", is_flag=True, help="Use the decisions that the ledger holds, in place of a file.")
    @click.option("--namespace", metavar="NAME", multiple=True, help="Only traces with this namespace in their id; none: ''.")
    @click.option("--agent", metavar="ID", multiple=True, help="Only traces with this metadata.agent_id; none: ''.")
    @ledger_options
    @wraps(command)
    def with_decisions(
        *args: Any,
        file: str | None,
        stored: bool,
        namespace: tuple[str, ...],
        agent: tuple[str, ...],
        settings: Settings,
        **kwargs: Any,
    ) -> None:
        if stored == (file is not None):
            raise click.UsageError("expected either FILE, of traces or of decisions, or --stored")
        settings = with_endpoints(settings) if file is None else settings
        gathered = _gather_stored(settings) if file is None else gather_file(file, settings)
        if not gathered.decisions:
            raise ScorerError(f"there are no decisions in {gathered.source}")
        if namespace:
            gathered = gathered.only("--namespace", namespace, lambda decision: namespace_of(decision.trace_id))
        if agent:
            gathered = gathered.only("--agent", agent, lambda decision: decision.agent_id or "")
        command(*args, gathered=gathered, settings=settings, **kwargs)
        if gathered.refused:
            sys.exit(1)

    return with_decisions


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
    decisions: dict[str, Decision] = {}
    successes: dict[str, bool] = {}
    refused = 0
    lines = read_traces(stream, settings.limits)
    batches = iter(lambda: list(islice(lines, settings.worker.batch_size)), [])
    for line, result in score_lines(batches, settings):
        if isinstance(result, Decision) and not isinstance(line.trace, InvalidTrace):
            decisions.setdefault(result.trace_id, result)
            successes[result.trace_id] = line.trace.metadata.success
            if traces is not None:
                traces[result.trace_id] = line.trace
        elif not isinstance(result, Decision):
            refused += 1
            refusal(line.number, result)
    return Gathered(list(decisions.values()), successes, 0, refused, name, {})


def _gather_stored(settings: Settings) -> Gathered:
    decisions: list[Decision] = []
    labels: dict[str, bool] = {}
    with Store.open(settings) as store, progress("read") as advance:
        total = store.ledger.counts().decided
        for stored in store.ledger.all_decided():
            decisions.append(stored.decision)
            if stored.good is not None:
                labels[stored.decision.trace_id] = stored.good
            advance(len(decisions), max(total, len(decisions)))
        dead_letters = sum(1 for _ in store.dead_letters.read())
        damaged = note_damaged(store.ledger.damaged)
    return Gathered(sorted(decisions, key=_place), {}, dead_letters, damaged, "the ledger", labels)


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
    return Gathered(list(decisions.values()), {}, 0, refused, name, labels)
