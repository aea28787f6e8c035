"""``kp-scorer dead-letter``: list, show, replay and drop submissions that could not be decided."""

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import wraps
from typing import Any, cast

import click

from kp_scorer.broker.wire import parse_submission
from kp_scorer.cli.ids import exact_trace_id, resolve_among
from kp_scorer.cli.options import Command, choice_option, service_options, yes_option
from kp_scorer.cli.output import print_json, print_note, print_row
from kp_scorer.client import Client
from kp_scorer.decoding import parse_strict_json
from kp_scorer.errors import REASONS, InvalidTrace, TraceConflict
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLetter, DeadLetters
from kp_scorer.store.runs import run_in


@click.group("dead-letter")
def dead_letter() -> None:
    """List, show, replay or drop dead letters: submissions that could not be decided.

    The beginning of a dead letter's ID is enough if it is unique.

    Example: kp-scorer dead-letter list --reason invalid
    """


def _selection(command: Command) -> Command:
    """Add the options that select dead letters, and pass the command the ``store`` and the selected ``dead_letters``.

    The exit code is 1 if an id has no dead letter.
    """

    @click.argument("letter_ids", metavar="[ID]...", nargs=-1)
    @choice_option("--reason", choices=REASONS, help="Only dead letters with this reason.")
    @click.option(
        "--trace-id", metavar="ID", help="Only dead letters of the trace with this exact id; kp:trace: may be left out."
    )
    @service_options
    @wraps(command)
    def with_selection(
        letter_ids: tuple[str, ...], reason: str | None, trace_id: str | None, settings: Settings, **options: Any
    ) -> bool:
        exact = "" if trace_id is None else exact_trace_id(trace_id)
        with Store.open(settings) as store:
            dead_letters, missing = _selected(store.dead_letters, letter_ids, reason or "", exact)
            try:
                failed = command(store=store, dead_letters=dead_letters, settings=settings, **options)
            finally:
                for letter_id in missing:
                    print_note(f"{letter_id}: there is no such dead letter")
        return bool(failed or missing)

    return with_selection


def _selected(
    dead_letters: DeadLetters, letter_ids: tuple[str, ...], reason: str, trace_id: str
) -> tuple[Iterable[DeadLetter], list[str]]:
    """Return the selected dead letters, and the ids that have none. Without ids, dead letters are read while they are used."""

    def is_selected(letter: DeadLetter) -> bool:
        return reason in ("", letter.reason) and trace_id in ("", letter.trace_id)

    if not letter_ids:
        return filter(is_selected, dead_letters.read()), []
    for each_id in letter_ids:
        exact_trace_id(each_id)
    existing = {each.letter_id: each for each in dead_letters.read(*letter_ids)}
    wanted = {resolve_among(letter_id, existing) for letter_id in letter_ids}
    chosen = (each for letter_id, each in existing.items() if letter_id in wanted)
    return filter(is_selected, chosen), sorted(wanted.difference(existing))


@dead_letter.command("list", epilog="Example: kp-scorer dead-letter list --reason conflict")
@_selection
def list_dead_letters(dead_letters: Iterable[DeadLetter], **_: Any) -> None:
    """Print a line for each dead letter, without its content. The newest comes last."""
    for each in dead_letters:
        print_row(_described(each))


@dead_letter.command(epilog="Example: kp-scorer dead-letter show 5d41402a")
@_selection
def show(store: Store, dead_letters: Iterable[DeadLetter], settings: Settings) -> None:
    """Print dead letters with their content as it was received. A message too large for a worker is cut off."""
    for each in dead_letters:
        content = store.dead_letters.payload(each.letter_id)
        try:
            payload: object = parse_strict_json(content, settings.limits)
        except InvalidTrace:
            # The content is not JSON within the limits of a trace, so print a text that shows every byte.
            payload = content.decode("utf-8", "backslashreplace")
        print_json({**_described(each), "payload": payload})


@dead_letter.command(epilog="Example: kp-scorer dead-letter replay --reason scoring_failed")
@_selection
def replay(store: Store, dead_letters: Iterable[DeadLetter], settings: Settings) -> bool:
    """Submit dead letters again, as their producers would. Those that the queue accepts are dropped; the others stay.

    Spans go back to `serve`, which converts them by the settings that it has then.
    """
    stayed = 0
    with Client(settings) as client:
        for each in dead_letters:
            try:
                payload = store.dead_letters.payload(each.letter_id)
                if run := run_in(each.trace_id, payload):
                    store.runs.reopen(*run)
                else:
                    client.submit(cast("dict[str, Any]", parse_submission(payload, settings.limits)))
                store.dead_letters.drop(each)
                _print_state(each, "pending")
            except (InvalidTrace, TraceConflict) as error:
                stayed += 1
                print_note(f"{each.letter_id}: {error}")
                _print_state(each, "dead")
    return stayed > 0


@dead_letter.command(epilog="Example: kp-scorer dead-letter drop 5d41402a")
@yes_option
@_selection
def drop(store: Store, dead_letters: Iterable[DeadLetter], yes: bool, **_: Any) -> None:
    """Remove dead letters for good: all of them, or those that are selected."""
    if not yes and (dead_letters := list(dead_letters)):
        click.confirm(f"Remove {len(dead_letters)} dead letters for good?", abort=True, err=True)
    for each in dead_letters:
        # If it is not dropped, it was dead-lettered again meanwhile.
        _print_state(each, "dropped" if store.dead_letters.drop(each) else "dead")


def _print_state(each: DeadLetter, state: str) -> None:
    print_row({"letter_id": each.letter_id, "trace_id": each.trace_id, "state": state})


def _described(each: DeadLetter) -> dict[str, Any]:
    described = {name: value for name, value in each._asdict().items() if value not in ("", None) or name == "trace_id"}
    for name in ("first", "last"):
        at = datetime.fromtimestamp(described.pop(f"{name}_ms") / 1_000, UTC)
        described[f"{name}_at"] = at.isoformat(timespec="milliseconds")
    return described
