"""``kp-scorer dead-letter``: look at what could not be decided, and try it again or drop it."""

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import Any, cast

import click

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.oversized import Oversized
from kp_scorer.broker.task_message import parse_submission
from kp_scorer.cli.ids import whole_among, whole_letter_id
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, say
from kp_scorer.client import Client
from kp_scorer.decoding import Limits, parse_strict_json
from kp_scorer.errors import REASONS, InvalidTrace, TraceConflict
from kp_scorer.settings import Settings
from kp_scorer.store import DeadLetter, Store


@click.group("dead-letter")
def dead_letter() -> None:
    """Look at dead letters: submissions that could not be decided. Replay or drop them.

    The beginning of a dead letter's ID will do where no other has it.

    Example: kp-scorer dead-letter list --reason invalid
    """


def _chosen(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose dead letters, and pass the command the ``store`` and the ``letters`` that are chosen.

    Exits 1 if there is no dead letter for an id.
    """

    @click.argument("letter_ids", metavar="[ID]...", nargs=-1)
    @click.option("--reason", type=click.Choice(REASONS), help="Only those that are dead for this reason.")
    @click.option("--trace-id", help="Only those of this trace; the beginning of its id will do, as of IDs.")
    @click.option("--since", type=click.DateTime(), help="Only those last buried at this time (UTC) or later.")
    @click.option("--before", type=click.DateTime(), help="Only those last buried before this time (UTC).")
    @service_options
    @wraps(command)
    def with_choice(
        letter_ids: tuple[str, ...],
        reason: str | None,
        trace_id: str | None,
        since: datetime | None,
        before: datetime | None,
        settings: Settings,
        **rest: Any,
    ) -> None:
        with Store.open(settings) as store:
            letters = list(store.dead_letters.read())
            known = {letter.letter_id for letter in letters}
            wanted = {whole_letter_id(letter_id, known) for letter_id in letter_ids}
            named = None if trace_id is None else whole_among(trace_id, (letter.trace_id for letter in letters))

            def is_chosen(letter: DeadLetter) -> bool:
                last = datetime.fromtimestamp(letter.last_ms / 1_000, UTC).replace(tzinfo=None)
                return (
                    (not wanted or letter.letter_id in wanted)
                    and reason in (None, letter.reason)
                    and named in (None, letter.trace_id)
                    and (since is None or last >= since)
                    and (before is None or last < before)
                )

            try:
                command(store=store, letters=[letter for letter in letters if is_chosen(letter)], settings=settings, **rest)
            finally:
                for letter_id in sorted(wanted - known):
                    say(f"{letter_id}: there is no such dead letter")
        if wanted - known:
            sys.exit(1)

    return with_choice


@dead_letter.command("list", epilog="Example: kp-scorer dead-letter list --reason conflict")
@_chosen
def list_letters(store: Store, letters: Sequence[DeadLetter], settings: Settings) -> None:
    """Print a JSON line for each dead letter, without its content, the least recently buried first."""
    with make_celery(settings) as app:
        oversized = Oversized(app, settings)
        for letter in letters:
            print_json(_described(letter, oversized.size_bytes(letter.letter_id)))


@dead_letter.command(epilog="Example: kp-scorer dead-letter show 5d41402a")
@_chosen
def show(store: Store, letters: Sequence[DeadLetter], settings: Settings) -> None:
    """Print dead letters with their content, the submission as it was received.

    Of a message too large for a worker, that is the whole for as long as Redis keeps it; then its beginning.
    """
    with make_celery(settings) as app:
        oversized = Oversized(app, settings)
        for letter in letters:
            content = oversized.whole(letter.letter_id) or store.dead_letters.payload(letter.letter_id)
            print_json({**_described(letter, len(content)), "payload": _readable(content, settings.limits)})


@dead_letter.command(epilog="Example: kp-scorer dead-letter replay --reason invalid --dry-run")
@click.option("--dry-run", is_flag=True, help="Change nothing; only list them.")
@_chosen
def replay(store: Store, letters: Sequence[DeadLetter], dry_run: bool, settings: Settings) -> None:
    """Submit dead letters again, as their producers would; those accepted by the queue are dropped, the others stay."""
    stayed = 0
    with Client(settings) as client:
        for letter in letters:
            state = "would be replayed"
            if not dry_run:
                try:
                    submission = parse_submission(store.dead_letters.payload(letter.letter_id), settings.limits)
                    client.submit(cast("dict[str, Any]", submission))
                    store.dead_letters.drop(letter)
                    state = "pending"
                except (InvalidTrace, TraceConflict) as error:
                    stayed += 1
                    state = "dead"
                    say(f"{letter.letter_id}: {error}")
            print_json({"letter_id": letter.letter_id, "trace_id": letter.trace_id, "state": state})
    if stayed:
        sys.exit(1)


@dead_letter.command(epilog="Example: kp-scorer dead-letter drop 5d41402a")
@click.option("--dry-run", is_flag=True, help="Change nothing; only list them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_chosen
def drop(store: Store, letters: Sequence[DeadLetter], dry_run: bool, yes: bool, settings: Settings) -> None:
    """Remove dead letters and their bytes for good; all of them, unless some are chosen."""
    with make_celery(settings) as app:
        if letters and not (dry_run or yes):
            click.confirm(f"Remove {len(letters)} dead letters for good?", abort=True, err=True)
        oversized = Oversized(app, settings)
        for letter in letters:
            state = "would be dropped"
            if not dry_run:
                # One that is buried again meanwhile stays.
                state = "dropped" if store.dead_letters.drop(letter) else "dead"
            print_json({"letter_id": letter.letter_id, "trace_id": letter.trace_id, "state": state})
            if state == "dropped":
                oversized.remove(letter.letter_id)


def _readable(payload: bytes, limits: Limits) -> object:
    """The payload parsed if it is JSON, of no more values and no deeper than a trace, else as text that shows every byte."""
    try:
        return parse_strict_json(payload, limits)
    except InvalidTrace:
        return payload.decode("utf-8", "backslashreplace")


def _described(letter: DeadLetter, whole_bytes: int | None) -> dict[str, Any]:
    """A letter as it is printed; ``whole_bytes`` is the size of what is kept of it, if that is more than its payload."""
    described = letter._asdict()
    if whole_bytes is not None:
        described["size_bytes"] = whole_bytes
    for name in ("first", "last"):
        at = datetime.fromtimestamp(described.pop(f"{name}_ms") / 1_000, UTC)
        described[f"{name}_at"] = at.isoformat(timespec="milliseconds")
    return described
