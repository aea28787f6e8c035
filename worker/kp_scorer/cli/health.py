"""``kp-scorer health``: what a probe asks of the worker on this machine.

Nothing but the standard library and click is imported, for it is run every few seconds, beside a worker that needs the cores.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from kp_scorer.characters import escaped
from kp_scorer.errors import SettingsError
from kp_scorer.health import State, chosen_directory, find, read, why_not_live, why_not_ready


def _of_workers(command: Callable[[Sequence[State]], None]) -> Callable[..., None]:
    """Add the options that say which worker is meant, and pass what it noted last, or what all of this user's did."""

    @click.option("--pid", type=click.IntRange(min=1), help="The worker's process; by default all of this user's count.")
    @click.option("--file", type=click.Path(path_type=Path, dir_okay=False), help="The worker's file itself.")
    @click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings (KP_CONFIG).")
    @wraps(command)
    def with_state(pid: int | None, file: Path | None, config: Path | None) -> None:
        if file is not None:
            command(list(filter(None, [read(file)])))
            return
        try:
            found = find(chosen_directory(config), pid)
        except SettingsError as error:
            raise click.BadParameter(str(error), param_hint="--config") from None
        except OSError as error:
            raise click.ClickException(f"health.directory: {error.strerror}") from None
        command(found)

    return with_state


@click.group()
def health() -> None:
    """Say whether the worker on this machine moves, or takes work: exit code 0 if it does, else 1.

    Where there are several, all must. A JSON line on stdout for each gives the reasons. The worker is not asked: once a second
    it notes how it is, in a file of its own in health.directory.

    Example: kp-scorer health ready
    """


@health.command(epilog="Example: kp-scorer health live")
@_of_workers
def live(states: Sequence[State]) -> None:
    """Say whether the worker moves: its consumer, its batches, each message in hand, and the file itself.

    One that waits for Redis or the broker moves: to start it again would not help.
    """
    _answer("live", states, why_not_live)


@health.command(epilog="Example: kp-scorer health ready")
@_of_workers
def ready(states: Sequence[State]) -> None:
    """Say whether the worker takes work.

    Its model is loaded, Redis and the broker answer it, it has the whole window of the novelty log, and nobody has told it to
    stop.
    """
    _answer("ready", states, why_not_ready)


def _answer(asked: str, states: Sequence[State], why_not: Callable[[State], Iterable[str]]) -> None:
    found: list[tuple[int | None, list[str]]] = [(state.pid, list(why_not(state))) for state in states]
    for pid, reasons in found or [(None, ["no worker of this user has noted how it is"])]:
        row: dict[str, Any] = {asked: not reasons, "pid": pid, "reasons": reasons}
        sys.stdout.write(escaped(json.dumps(row, ensure_ascii=False, separators=(",", ":"))) + "\n")
        sys.stdout.flush()
        for reason in reasons:
            click.echo(f"not {asked}: {escaped(reason)}", err=True)
    if not found or any(reasons for _, reasons in found):
        sys.exit(1)
