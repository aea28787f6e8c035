"""``kp-scorer demo``: the whole path, on an embedded Redis."""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

import click

from kp_scorer.cli.input import open_input, read_traces
from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import console, progress, say, say_if_unmeasured
from kp_scorer.cli.processes import worker_processes
from kp_scorer.cli.table import decisions_table
from kp_scorer.cli.words import short_id
from kp_scorer.client import Client, Status
from kp_scorer.decision import Decision
from kp_scorer.errors import InvalidTrace, ServiceUnavailable, TraceConflict
from kp_scorer.settings import Settings
from kp_scorer.store.endpoints import with_endpoints
from kp_scorer.store.local_redis import embedded_redis


@click.command(epilog="Example: kp-scorer demo my-traces.jsonl")
@click.argument("file", metavar="[FILE|-]", type=click.Path(allow_dash=True), required=False)
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds to wait.")
@settings_options
def demo(file: str | None, timeout_s: float, settings: Settings) -> None:
    """Start an embedded Redis and a worker, submit traces, show the decisions, stop everything.

    Submits the sample traces that come with the package, or those in FILE (- for standard input).
    """
    # Without configured URLs and with few logs: a demo must not reach anyone's queue, nor bury its table in log lines.
    log = settings.log.model_copy(update={"level": "error"})
    endpoints = {
        "broker": settings.broker.model_copy(update={"url": ""}),
        "redis": settings.redis.model_copy(update={"url": ""}),
    }
    settings = settings.model_copy(update={"log": log, **endpoints})
    with ExitStack() as stack:
        data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kp-scorer-")))
        url = stack.enter_context(embedded_redis(data_dir))
        say("started an embedded Redis and a worker; the worker loads its model")
        (process,) = stack.enter_context(worker_processes(settings, url, 1))
        local = settings.model_copy(update={"redis": settings.redis.model_copy(update={"url": url})})
        client = stack.enter_context(Client(with_endpoints(local)))
        trace_ids, refused = _submit(client, file, settings)
        settled = _watch(client, trace_ids, timeout_s, lambda: process.poll() is None)
    if not _summarise(trace_ids, settled) or refused:
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
                say(f"line {line.number}: {error}")
    say(f"submitted {len(trace_ids)} traces" if trace_ids else f"no traces in {name}")
    return list(dict.fromkeys(trace_ids)), refused


def _watch(client: Client, trace_ids: Sequence[str], timeout_s: float, worker_lives: Callable[[], bool]) -> dict[str, Status]:
    started = time.monotonic()
    settled: dict[str, Status] = {}
    with progress("scored") as advance:
        while len(settled) < len(trace_ids) and time.monotonic() - started < timeout_s:
            if not worker_lives():
                raise ServiceUnavailable("the worker ended; its log above says why")
            left = [trace_id for trace_id in trace_ids if trace_id not in settled]
            for status in client.as_settled(left, timeout_s=1.0):
                if not settled and status.decision:
                    first = f"{short_id(status.trace_id)} {status.decision.outcome} with {status.decision.score:.3f}"
                    say(f"first decision after {time.monotonic() - started:.1f} s: {first}")
                    say_if_unmeasured(status.decision)
                settled[status.trace_id] = status
                advance(len(settled), len(trace_ids))
    return settled


def _summarise(trace_ids: Sequence[str], settled: dict[str, Status]) -> bool:
    """Show what became of the traces; return whether all were decided."""
    decisions: list[Decision] = [
        status.decision for trace_id in trace_ids if (status := settled.get(trace_id)) and status.decision
    ]
    if decisions:
        out = console()
        out.print(decisions_table(decisions, out.width))
    outcomes = Counter(decision.outcome for decision in decisions)
    dead = sum(status.state == "dead" for status in settled.values())
    pending = len(trace_ids) - len(settled)
    say(
        f"{len(trace_ids)} traces: {outcomes['accepted']} accepted, "
        + (f"{outcomes['review']} to review, " if outcomes["review"] else "")
        + f"{outcomes['rejected']} rejected"
        + (f", {dead} dead" if dead else "")
        + (f", {pending} still pending" if pending else "")
    )
    return not dead and not pending
