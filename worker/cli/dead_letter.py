"""``kp-scorer dead-letter``: look at what could not be decided, and try it again or drop it."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from typing import Any, cast

import click

from worker.cli.options import settings_options
from worker.cli.output import print_json, say
from worker.client import Client
from worker.dead_letters import REASONS, DeadLetter, DeadLetters
from worker.embedded import with_endpoints
from worker.errors import InvalidTrace, TraceConflict
from worker.keys import Keys
from worker.redis_client import connect
from worker.settings import Settings
from worker.trace import parse_json


@click.group("dead-letter")
def dead_letter() -> None:
    """Look at dead letters: submissions that could not be decided. Replay or drop them.

    Example: kp-scorer dead-letter list --reason invalid
    """


def _chosen(command: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments that choose dead letters, and pass the command a ``wanted`` that tells which are meant.

    An id may be cut short.
    """

    @click.argument("letter_ids", metavar="[ID]...", nargs=-1)
    @click.option("--reason", type=click.Choice(REASONS), help="Only those that are dead for this reason.")
    @click.option("--trace-id", help="Only those of this trace.")
    @click.option("--since", type=click.DateTime(), help="Only those last buried at this time (UTC) or later.")
    @click.option("--before", type=click.DateTime(), help="Only those last buried before this time (UTC).")
    @settings_options
    @wraps(command)
    def with_choice(
        letter_ids: tuple[str, ...],
        reason: str | None,
        trace_id: str | None,
        since: datetime | None,
        before: datetime | None,
        **rest: Any,
    ) -> None:
        def wanted(letter: DeadLetter) -> bool:
            last = datetime.fromtimestamp(letter.last_ms / 1_000, UTC).replace(tzinfo=None)
            return (
                (not letter_ids or letter.letter_id.startswith(letter_ids))
                and reason in (None, letter.reason)
                and trace_id in (None, letter.trace_id)
                and (since is None or last >= since)
                and (before is None or last < before)
            )

        command(wanted=wanted, **rest)

    return with_choice


@dead_letter.command("list", epilog="Example: kp-scorer dead-letter list --reason conflict")
@_chosen
def list_letters(wanted: Callable[[DeadLetter], bool], settings: Settings) -> None:
    """Print a JSON line for each dead letter, without its content, the one longest not heard of first."""
    with _open(with_endpoints(settings)) as letters:
        for letter in filter(wanted, letters.read()):
            print_json(_described(letter))


@dead_letter.command(epilog="Example: kp-scorer dead-letter show 5d41402a")
@_chosen
def show(wanted: Callable[[DeadLetter], bool], settings: Settings) -> None:
    """Print dead letters with their content, the submission as it came."""
    with _open(with_endpoints(settings)) as letters:
        for letter in filter(wanted, letters.read()):
            print_json({**_described(letter), "payload": _readable(letters.payload(letter.letter_id))})


@dead_letter.command(epilog="Example: kp-scorer dead-letter replay --reason invalid --dry-run")
@click.option("--dry-run", is_flag=True, help="Only say which.")
@_chosen
def replay(wanted: Callable[[DeadLetter], bool], dry_run: bool, settings: Settings) -> None:
    """Submit dead letters again, as their producers would; those accepted by the queue are dropped, the others stay."""
    settings = with_endpoints(settings)
    stayed = 0
    with _open(settings) as letters, Client(settings) as client:
        for letter in filter(wanted, list(letters.read())):
            state = "would be replayed"
            if not dry_run:
                try:
                    submission = parse_json(letters.payload(letter.letter_id), settings.limits.limits())
                    client.submit(cast("dict[str, Any]", submission))
                    letters.drop(letter.letter_id)
                    state = "pending"
                except (InvalidTrace, TraceConflict) as error:
                    stayed += 1
                    state = "dead"
                    say(f"{letter.letter_id}: {error}")
            print_json({"letter_id": letter.letter_id, "trace_id": letter.trace_id, "state": state})
    if stayed:
        sys.exit(1)


@dead_letter.command(epilog="Example: kp-scorer dead-letter drop 5d41402a")
@click.option("--dry-run", is_flag=True, help="Only say which.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_chosen
def drop(wanted: Callable[[DeadLetter], bool], dry_run: bool, yes: bool, settings: Settings) -> None:
    """Remove dead letters for good, their bytes with them; all that there are, unless told which."""
    with _open(with_endpoints(settings)) as letters:
        chosen = list(filter(wanted, letters.read()))
        if chosen and not (dry_run or yes):
            click.confirm(f"Remove {len(chosen)} dead letters for good?", abort=True, err=True)
        for letter in chosen:
            if not dry_run:
                letters.drop(letter.letter_id)
            state = "would be dropped" if dry_run else "dropped"
            print_json({"letter_id": letter.letter_id, "trace_id": letter.trace_id, "state": state})


@contextmanager
def _open(settings: Settings) -> Iterator[DeadLetters]:
    with connect(settings.redis) as client:
        yield DeadLetters(client, Keys(settings.redis.prefix), settings.ledger.ttl_ms)


def _readable(payload: bytes) -> Any:
    """The payload as JSON if it is, else as text that shows every byte."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return payload.decode("utf-8", "backslashreplace")


def _described(letter: DeadLetter) -> dict[str, Any]:
    described = letter._asdict()
    for name in ("first", "last"):
        at = datetime.fromtimestamp(described.pop(f"{name}_ms") / 1_000, UTC)
        described[f"{name}_at"] = at.isoformat(timespec="milliseconds")
    return described
