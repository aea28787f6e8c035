"""``kp-scorer demo``: the whole path, on an embedded Redis."""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Final

import click
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kp_scorer.cli.display import OVERRIDE_WORDS, cell, console, progress, short_id
from kp_scorer.cli.input import open_input, read_traces
from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import note_if_unmeasured, print_note, refusal
from kp_scorer.cli.processes import worker_processes
from kp_scorer.client import Client, Status
from kp_scorer.decision import Decision, Outcome
from kp_scorer.errors import InvalidTrace, ServiceUnavailable, TraceConflict
from kp_scorer.local.embedded import embedded_redis
from kp_scorer.local.endpoints import with_endpoints
from kp_scorer.settings import Settings

_LONGEST_BUILT_IN: Final = 16
_LOW: Final = 0.5
_HIGH: Final = 0.8
_CLOSE: Final = 0.6
_COLOURS: Final[dict[Outcome, str]] = {"accepted": "green", "review": "yellow", "rejected": "red"}


@click.command(epilog="Example: kp-scorer demo my-traces.jsonl")
@click.argument("file", metavar="[FILE|-]", type=click.Path(allow_dash=True), required=False)
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds to wait.")
@settings_options
def demo(file: str | None, timeout_s: float, settings: Settings) -> None:
    """Start an embedded Redis and a worker, submit traces, show the decisions, stop everything.

    Submits the sample traces that come with the package, or those in FILE (- for standard input).
    """
    # Without configured URLs and with few logs: a demo must neither reach anyone's queue nor hide its table among log lines.
    log = settings.log.model_copy(update={"level": "error"})
    broker, redis = (section.model_copy(update={"url": ""}) for section in (settings.broker, settings.redis))
    # In the order of the file, which decides what a trace is compared with: so each run has the same decisions.
    worker = settings.worker.model_copy(update={"batch_size": 1})
    settings = settings.model_copy(update={"log": log, "broker": broker, "redis": redis, "worker": worker})
    with ExitStack() as stack:
        data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kp-scorer-")))
        url = stack.enter_context(embedded_redis(data_dir))
        print_note("started an embedded Redis and a worker, which loads its embedder")
        (process,) = stack.enter_context(worker_processes(settings, url, 1))
        local = settings.model_copy(update={"redis": redis.model_copy(update={"url": url})})
        client = stack.enter_context(Client(with_endpoints(local)))
        trace_ids, refused = _submit(client, file, settings)
        completed = _watch(client, trace_ids, timeout_s, lambda: process.poll() is None)
    if not _summarise(trace_ids, completed) or refused:
        sys.exit(1)


def _submit(client: Client, file: str | None, settings: Settings) -> tuple[list[str], int]:
    """Submit a file's traces, or the samples; return their ids and how many lines were refused."""
    with ExitStack() as stack:
        samples = resources.files("kp_scorer.samples").joinpath("traces.jsonl")
        name = file or str(stack.enter_context(resources.as_file(samples)))
        stream = stack.enter_context(open_input(name))
        trace_ids: list[str] = []
        refused = 0
        for line in read_traces(stream, settings.limits):
            try:
                if isinstance(line.trace, InvalidTrace):
                    raise line.trace
                trace_ids.append(client.submit(line.trace))
            except (InvalidTrace, TraceConflict) as error:
                refused += 1
                refusal(line.number, error)
    print_note(f"submitted {len(trace_ids)} traces" if trace_ids else f"no traces in {name}")
    return list(dict.fromkeys(trace_ids)), refused


def _watch(client: Client, trace_ids: Sequence[str], timeout_s: float, worker_lives: Callable[[], bool]) -> dict[str, Status]:
    started = time.monotonic()
    completed: dict[str, Status] = {}
    with progress("scored") as advance:
        while len(completed) < len(trace_ids) and time.monotonic() - started < timeout_s:
            if not worker_lives():
                raise ServiceUnavailable("the worker ended; its log above says why")
            left = [trace_id for trace_id in trace_ids if trace_id not in completed]
            for status in client.as_completed(left, timeout_s=1.0):
                if not completed and status.decision:
                    first = f"{short_id(status.trace_id)} {status.decision.outcome} with {status.decision.score:.3f}"
                    print_note(f"first decision after {time.monotonic() - started:.1f} s: {first}")
                    note_if_unmeasured(status.decision)
                completed[status.trace_id] = status
                advance(len(completed), len(trace_ids))
    return completed


def _summarise(trace_ids: Sequence[str], completed: dict[str, Status]) -> bool:
    """Show what became of the traces; return whether all were decided."""
    decisions = [status.decision for trace_id in trace_ids if (status := completed.get(trace_id)) and status.decision]
    if decisions:
        console().print(decisions_table(decisions))
    outcomes = Counter(decision.outcome for decision in decisions)
    dead = sum(status.state == "dead" for status in completed.values())
    pending = len(trace_ids) - len(completed)
    counts = [f"{outcomes['accepted']} accepted", f"{outcomes['rejected']} rejected"]
    others = {"to review": outcomes["review"], "dead": dead, "still pending": pending}
    counts += [f"{count} {words}" for words, count in others.items() if count]
    print_note(f"{len(trace_ids)} traces: {', '.join(counts)}")
    return not dead and not pending


def decisions_table(decisions: Sequence[Decision]) -> Table:
    """One row a decision, in 80 columns: trace, domain, score, threshold, outcome, and why in a few words."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("trace", no_wrap=True)
    table.add_column("domain", no_wrap=True, max_width=_LONGEST_BUILT_IN)
    for heading in ("score", "needs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("decision", no_wrap=True)
    table.add_column("why")
    for decision in decisions:
        table.add_row(
            escape(short_id(decision.trace_id)),
            cell(decision.domain),
            f"{decision.score:.3f}",
            f"{decision.threshold:g}",
            f"[{_COLOURS[decision.outcome]}]{decision.outcome}[/]",
            escape(why(decision)),
        )
    return table


def why(decision: Decision) -> str:
    """What weighed most, in a few words: guards, overrides, an earlier trace like it, dimensions that are high or low."""
    fired = [override.name for override in decision.overrides]
    reasons = [f"guard {guard.name}" for guard in decision.guards if guard.rejects]
    reasons += [words for name, words in OVERRIDE_WORDS.items() if name in fired]
    parts, nearest, is_accepted = decision.dimensions, decision.novelty.nearest, decision.outcome == "accepted"
    if decision.novelty.duplicate_of and not is_accepted:
        reasons.append(f"repeats {short_id(decision.novelty.duplicate_of)}")
    elif nearest and nearest.similarity >= _CLOSE and not is_accepted:
        reasons.append(f"close to {short_id(nearest.trace_id)} ({nearest.similarity:.2f})")
    values = {
        "complexity": parts.complexity,
        "novelty": parts.novelty,
        "tools": parts.tool_diversity,
        "outcome": parts.outcome_confidence,
    }
    telling = [name for name, value in values.items() if (value >= _HIGH if is_accepted else value < _LOW)]
    if telling:
        reasons.append(f"{'high' if is_accepted else 'low'} {', '.join(telling)}")
    return ", ".join(reasons)
