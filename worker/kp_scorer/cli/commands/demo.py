"""``kp-scorer demo``: the whole path, on an embedded Redis."""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from shlex import join
from typing import Final

import click

from kp_scorer.analysis.calibration import Target
from kp_scorer.characters import escaped
from kp_scorer.cli.commands.up import worker_processes
from kp_scorer.cli.converting import Conversion, converting_options
from kp_scorer.cli.display import DecisionTable, progress
from kp_scorer.cli.input import read_files
from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import note_if_unmeasured, print_note, print_text, refusal
from kp_scorer.client import Client, Status
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, ServiceUnavailable, TraceConflict
from kp_scorer.local import embedded_redis
from kp_scorer.settings import Settings

_PROPOSED: Final = Target("accept", 0.2)


@click.command(epilog="Example: kp-scorer demo my-traces.jsonl")
@click.argument("files", metavar="[FILE|FOLDER|-...]", nargs=-1, type=click.Path(allow_dash=True))
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds to wait.")
@settings_options
@converting_options
def demo(files: tuple[str, ...], timeout_s: float, settings: Settings, conversion: Conversion) -> None:
    """Start an embedded Redis and a worker, submit traces, show the decisions, stop everything.

    Submits the sample traces that come with the package, or those in FILE (a folder, or - for standard input).
    """
    # Without configured URLs and with few logs: a demo must neither reach anyone's queue nor hide its table among log lines.
    log = settings.log.model_copy(update={"level": "error"})
    broker, redis = (section.model_copy(update={"url": ""}) for section in (settings.broker, settings.redis))
    # In the order of the file, which decides what a trace is compared with: so each run has the same decisions.
    worker = settings.worker.model_copy(update={"concurrency": 1})
    settings = settings.model_copy(update={"log": log, "broker": broker, "redis": redis, "worker": worker})
    with ExitStack() as stack:
        data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kp-scorer-")))
        url = stack.enter_context(embedded_redis(data_dir))
        print_note("started an embedded Redis and a worker, which loads its embedder")
        (process,) = stack.enter_context(worker_processes(settings, url, ports=[0]))
        local = settings.model_copy(update={"redis": redis.model_copy(update={"url": url})})
        client = stack.enter_context(Client(with_endpoints(local)))
        trace_ids, refused = _submit(client, files, settings, conversion)
        completed = _watch(client, trace_ids, timeout_s, lambda: process.poll() is None)
    if not _summarise(trace_ids, completed, files, conversion) or refused:
        sys.exit(1)


def _submit(client: Client, files: Sequence[str], settings: Settings, conversion: Conversion) -> tuple[list[str], int]:
    """Submit a file's traces, or the samples; return their ids and how many lines were refused."""
    with ExitStack() as stack:
        samples = resources.files("kp_scorer.samples").joinpath("traces.jsonl")
        names = files or [str(stack.enter_context(resources.as_file(samples)))]
        trace_ids: list[str] = []
        refused = 0
        for line in read_files(names, settings.limits, conversion):
            try:
                if isinstance(line.trace, InvalidTrace):
                    raise line.trace
                trace_ids.append(client.submit(line.trace))
            except (InvalidTrace, TraceConflict) as error:
                refused += 1
                refusal(line.number, error, line.file)
    print_note(f"submitted {len(trace_ids)} traces" if trace_ids else f"no traces in {', '.join(names)}")
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
                if status.decision:
                    note_if_unmeasured(status.decision)
                completed[status.trace_id] = status
                advance(len(completed), len(trace_ids))
    return completed


def _summarise(trace_ids: Sequence[str], completed: dict[str, Status], files: Sequence[str], conversion: Conversion) -> bool:
    """Show what became of the traces, and what to do next; return whether all were decided."""
    decisions = [status.decision for trace_id in trace_ids if (status := completed.get(trace_id)) and status.decision]
    table = DecisionTable()
    for decision in decisions:
        table.print_decision(decision)
    outcomes = Counter(decision.outcome for decision in decisions)
    dead = sum(status.state == "dead" for status in completed.values())
    pending = len(trace_ids) - len(completed)
    counts = [f"{outcomes['accepted']} accepted", f"{outcomes['rejected']} rejected"]
    others = {"to review": outcomes["review"], "dead": dead, "still pending": pending}
    counts += [f"{count} {words}" for words, count in others.items() if count]
    print_text(f"{len(trace_ids)} traces: {', '.join(counts)}\n")
    print_text(f"{_next_step(len(decisions), outcomes['accepted'], files, conversion)}\n")
    return not dead and not pending


def _next_step(decided: int, accepted: int, files: Sequence[str], conversion: Conversion) -> str:
    if not files or "-" in files:
        return "next, with traces of your own: kp-scorer demo FILE"
    named = escaped(join(files))
    if decided < _PROPOSED.least_traces:
        options = " …" if conversion.has_converted else ""
        return f"next, as a service: kp-scorer up, and in another terminal: kp-scorer submit {named}{options} --wait"
    # It converts nothing, and reads one file.
    converts = conversion.has_converted or len(files) > 1
    before, file = (f"kp-scorer convert {named} … > traces.jsonl, then ", "traces.jsonl") if converts else ("", named)
    calibrate = f"kp-scorer calibrate {file} --accept {_PROPOSED.percents} --output thresholds.toml"
    return f"{accepted} of {decided} accepted; for a fifth: {before}{calibrate}"
