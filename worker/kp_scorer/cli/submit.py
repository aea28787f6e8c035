"""``kp-scorer submit``: put traces on the queue."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import click

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.queues import results_queues
from kp_scorer.broker.results import unread
from kp_scorer.cli.input import Line, open_input, read_traces
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, print_status, progress, report_invalid, say
from kp_scorer.client import Client, Status
from kp_scorer.errors import InvalidTrace, ScorerError, TraceConflict
from kp_scorer.settings import Settings

_LOOK_EVERY_S: Final = 2.0
"""How long nothing may settle before the results queues are looked at, and how often they are."""


@click.command(epilog="Example: kp-scorer submit traces.jsonl --wait > decisions.jsonl")
@click.argument("file", metavar="FILE|-")
@click.option("--wait", is_flag=True, help="Wait for the decisions and print each with its trace_id.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), default=600.0, show_default=True, help="Seconds to wait.")
@service_options
def submit(file: str, wait: bool, timeout_s: float, settings: Settings) -> None:
    """Submit the traces in FILE (- for standard input): JSON Lines, or one JSON document.

    Prints one JSON line a trace: trace_id, state (pending, decided, dead, conflict, invalid) and, with --wait, the decision.
    Invalid lines are named by number and field; the others are submitted.
    """
    with Client(settings) as client, open_input(file) as stream:
        submitted, seen = _submit(client, read_traces(stream, settings.limits), print_each=not wait)
        say(f"submitted {len(submitted)} of {seen}" if seen else f"no traces in {file}")
        unsettled = _wait(client, list(dict.fromkeys(submitted)), timeout_s, settings) if wait else 0
    if len(submitted) < seen or unsettled:
        sys.exit(1)


def _submit(client: Client, lines: Iterable[Line], *, print_each: bool) -> tuple[list[str], int]:
    """Submit what can be submitted and report the rest; return the ids submitted and how many lines there were."""
    submitted: list[str] = []
    seen = 0
    with progress("submitted") as advance:
        for line in lines:
            seen += 1
            try:
                if isinstance(line.trace, InvalidTrace):
                    raise line.trace
                trace_id = client.submit(line.trace)
            except InvalidTrace as error:
                report_invalid(line, error)
            except TraceConflict as error:
                say(f"line {line.number}: {error}")
                print_json({"trace_id": error.trace_id, "state": "conflict", "line": line.number})
            else:
                submitted.append(trace_id)
                if print_each:
                    print_json({"trace_id": trace_id, "state": "pending"})
            advance(seen, None)
    return submitted, seen


def _wait(client: Client, trace_ids: Sequence[str], timeout_s: float, settings: Settings) -> int:
    """Print each trace as it settles; return how many are dead or still pending."""
    left = dict.fromkeys(trace_ids)
    dead = 0
    with progress("decided") as advance:
        for status in _as_settled(client, trace_ids, timeout_s, settings):
            del left[status.trace_id]
            dead += status.state == "dead"
            print_status(status)
            advance(len(trace_ids) - len(left), len(trace_ids))
    for trace_id in left:
        print_status(Status(trace_id, "pending"))
    if left:
        say(f"{len(left)} still pending after {timeout_s:g} s")
    return dead + len(left)


def _as_settled(client: Client, trace_ids: Sequence[str], timeout_s: float, settings: Settings) -> Iterator[Status]:
    """Give each trace as it settles; when none does for a while, say once if that is because nobody reads the results."""
    left = dict.fromkeys(trace_ids)
    deadline = time.monotonic() + timeout_s
    told = False
    while left and (left_s := deadline - time.monotonic()) >= 0:
        before = len(left)
        for status in client.as_settled(list(left), min(left_s, _LOOK_EVERY_S)):
            del left[status.trace_id]
            yield status
        if not told and len(left) == before:
            told = _say_what_is_full(settings)


def _say_what_is_full(settings: Settings) -> bool:
    """Say for which results queues the workers wait, and what to do about it; return whether there are any."""
    full: dict[str, list[str]] = {}
    # Why nothing comes is not worth an error of its own.
    with suppress(ScorerError), make_celery(settings) as app:
        counts = unread(app, settings)
        for outcome, queue in results_queues(settings).items():
            if settings.queues.when_full(outcome) == "wait" and settings.queues.is_full(counts[queue.name]):
                full.setdefault(queue.name, []).append(f"queues.{outcome}_when_full")
    for name, settings_names in full.items():
        say(
            f"the queue {name} is full of unread decisions, so the workers wait: "
            f"read it with `kp-scorer decisions`, or set {' and '.join(settings_names)}"
        )
    return bool(full)
