"""``kp-scorer submit``: put traces on the queue."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, get_args

import click

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.queues import results_streams
from kp_scorer.broker.results import unread
from kp_scorer.cli.input import Line
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, print_status, progress, refused, say, say_if_unmeasured
from kp_scorer.cli.reading import Reading
from kp_scorer.client import Client, Status, Submitted
from kp_scorer.decision import Outcome
from kp_scorer.errors import InvalidTrace, OutputFailed, ScorerError
from kp_scorer.settings import Settings
from kp_scorer.store import Store

_TOGETHER: Final = 100
"""How many traces go together; the client sends so many in one step."""
_LOOK_EVERY_S: Final = 2.0
"""How long nothing may settle before the results queues are looked at, and how often they are."""


@click.command(epilog="Example: kp-scorer submit traces.jsonl --wait > decisions.jsonl")
@click.argument("file", metavar="FILE|-", type=click.Path(allow_dash=True))
@click.option("--wait", is_flag=True, help="Wait for the decisions and print each with its trace_id.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), default=600.0, show_default=True, help="Seconds to wait.")
@click.option("--namespace", default="", help="Goes into every id, after kp:trace:, to keep it apart from other producers'.")
@service_options
def submit(file: str, wait: bool, timeout_s: float, namespace: str, settings: Settings) -> None:
    """Submit the traces in FILE (- for standard input): JSON Lines, or one JSON document; it may be gzipped.

    Prints one JSON line a trace: trace_id, state (pending, decided, dead, conflict, invalid) and, with --wait, the decision.
    Invalid lines are named by number and field; the others are submitted. All are, too, if nobody reads what is printed.
    """
    with Client(settings, namespace) as client:
        done = _submit(client, Reading(file, settings.limits, _TOGETHER), print_each=not wait)
        said = f"submitted {len(done.trace_ids)} of {done.seen}" if done.seen else f"no traces in {file}"
        if done.failure:
            raise OutputFailed(f"{done.failure}; {said} all the same")
        say(said)
        unsettled = _wait(client, list(dict.fromkeys(done.trace_ids)), timeout_s, settings) if wait else 0
    if len(done.trace_ids) < done.seen or unsettled:
        sys.exit(1)


class _Submitted(NamedTuple):
    """The ids of what was submitted, how many traces there were, and why not all of that could be printed."""

    trace_ids: list[str]
    seen: int
    failure: OutputFailed | None


def _submit(client: Client, reading: Reading, *, print_each: bool) -> _Submitted:
    """Submit what can be submitted and report the rest, for as long as there is somebody to report to."""
    trace_ids: list[str] = []
    seen = 0
    failure: OutputFailed | None = None
    with progress("submitted") as advance:
        for batch in reading.batches():
            for line, answer in zip(batch, _answers(client, batch), strict=True):
                seen += 1
                if isinstance(answer, str):
                    trace_ids.append(answer)
                row = {"trace_id": answer, "state": "pending"} if isinstance(answer, str) else refused(line, answer)
                try:
                    if print_each or not isinstance(answer, str):
                        print_json(row)
                except OutputFailed as error:
                    failure = error
            advance(seen, *reading.total())
    return _Submitted(trace_ids, seen, failure)


def _answers(client: Client, batch: Sequence[Line]) -> list[Submitted]:
    """Submit lines; return for each the id of its trace, or what is wrong with it."""
    answers = iter(client.submit_many(line.trace for line in batch if not isinstance(line.trace, InvalidTrace)))
    return [line.trace if isinstance(line.trace, InvalidTrace) else next(answers) for line in batch]


def _wait(client: Client, trace_ids: Sequence[str], timeout_s: float, settings: Settings) -> int:
    """Print each trace as it settles, and what the others are; return how many were not decided."""
    left = dict.fromkeys(trace_ids)
    dead = 0
    told = False
    with progress("decided") as advance:
        for status in _as_settled(client, trace_ids, timeout_s, settings):
            del left[status.trace_id]
            # Some may have been decided before, with another embedder.
            told = told or (status.decision is not None and say_if_unmeasured(status.decision))
            dead += status.state == "dead"
            print_status(status.trace_id, status)
            advance(len(trace_ids) - len(left), len(trace_ids))
    found = client.look_up(list(left)) if left else []
    for trace_id, known in zip(left, found, strict=True):
        print_status(trace_id, known)
    states = [known.state if known else "unknown" for known in found]
    if pending := states.count("pending"):
        say(f"{pending} still pending after {timeout_s:g} s")
    if unknown := states.count("unknown"):
        say(f"{unknown} unknown: forgotten, or dropped as dead letters, since they were submitted")
    return dead + len(left) - states.count("decided")


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
    with suppress(ScorerError), make_celery(settings) as app, Store.open(settings) as store:
        counts = unread(app, settings, store)
        streams = set(results_streams(settings).values())
        called = {settings.queues.name(outcome) for outcome in get_args(Outcome) if settings.via(outcome) == "task"}
        for outcome in get_args(Outcome):
            name = settings.queues.name(outcome)
            waits = settings.via(outcome) != "none" and settings.queues.when_full(outcome) == "wait"
            if waits and settings.queues.is_full(counts.get(name, 0)):
                full.setdefault(name, []).append(f"queues.{outcome}_when_full")
    for name, settings_names in full.items():
        kind, remedy = "queue", "read it with `kp-scorer decisions`"
        if name in streams:
            kind, remedy = "stream", "acknowledge them in each of its consumer groups"
        elif name in called:
            remedy = f"start workers of the Celery app that has the task {settings.results.task}"
        say(
            f"the {kind} {name} is full of unread decisions, so the workers wait: "
            f"{remedy}, or set {' and '.join(settings_names)}"
        )
    return bool(full)
