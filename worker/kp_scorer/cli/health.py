"""``kp-scorer health``: what a probe asks of the worker on this machine.

Nothing but the standard library and click is imported, for it is run every few seconds, beside a worker that needs the cores.
"""

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from kp_scorer.characters import escaped
from kp_scorer.errors import SettingsError
from kp_scorer.health import State, chosen_directory, find, read, why_not_live, why_not_ready


def _of_a_worker(command: Callable[[State | None], None]) -> Callable[..., None]:
    """Add the options that say which worker is meant, and pass what it noted last; None if there is nothing."""

    @click.option("--pid", type=click.IntRange(min=1), help="The worker's process, where this user has several here.")
    @click.option("--file", type=click.Path(path_type=Path, dir_okay=False), help="The worker's file itself.")
    @click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings (KP_CONFIG).")
    @wraps(command)
    def with_state(pid: int | None, file: Path | None, config: Path | None) -> None:
        if file is not None:
            command(read(file))
            return
        try:
            found = find(chosen_directory(config), pid)
        except SettingsError as error:
            raise click.BadParameter(str(error), param_hint="--config") from None
        except OSError as error:
            raise click.ClickException(f"health.directory: {error.strerror}") from None
        if len(found) > 1:
            pids = ", ".join(str(state.pid) for state in found)
            raise click.BadParameter(f"expected one of the workers that run here: {pids}", param_hint="--pid")
        command(found[0] if found else None)

    return with_state


@click.group()
def health() -> None:
    """Say whether the worker on this machine moves, or takes work: exit code 0 if it does, else 1.

    A JSON line on stdout gives the reasons. The worker is not asked: once a second it notes how it is, in a file of its own in
    health.directory.

    Example: kp-scorer health ready
    """


@health.command(epilog="Example: kp-scorer health live")
@_of_a_worker
def live(state: State | None) -> None:
    """Say whether the worker moves: its consumer, its batches, each message in hand, and the file itself.

    One that waits for Redis or the broker moves: to start it again would not help.
    """
    _answer("live", state, list(why_not_live(state)) if state else None)


@health.command(epilog="Example: kp-scorer health ready")
@_of_a_worker
def ready(state: State | None) -> None:
    """Say whether the worker takes work.

    Its model is loaded, Redis and the broker answer it, it has the whole window of the novelty log, and nobody has told it to
    stop.
    """
    _answer("ready", state, list(why_not_ready(state)) if state else None)


def _answer(asked: str, state: State | None, reasons: list[str] | None) -> None:
    if reasons is None:
        reasons = ["no worker of this user has noted how it is"]
    row: dict[str, Any] = {asked: not reasons, "pid": state.pid if state else None, "reasons": reasons}
    sys.stdout.write(escaped(json.dumps(row, ensure_ascii=False, separators=(",", ":"))) + "\n")
    sys.stdout.flush()
    for reason in reasons:
        click.echo(f"not {asked}: {escaped(reason)}", err=True)
    if reasons:
        sys.exit(1)
