"""Options and arguments that several commands share."""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click
from pydantic import BaseModel, ValidationError

from kp_scorer.cli.output import note_count
from kp_scorer.cli.unpacking import lines_in, open_input
from kp_scorer.decision import KINDS
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import SettingsError
from kp_scorer.logs import configure_logs
from kp_scorer.settings import Settings, load_settings

Command = Callable[..., int | None]

_MOST_LINE_BYTES: Final = 2**20
_MOST_BYTES: Final = 2**26  # The largest file of labels, which are all held in memory.

files_argument = click.argument("files", metavar="FILE|FOLDER|-...", nargs=-1, required=True, type=click.Path(allow_dash=True))


def choice_option(*names: str, choices: Iterable[str], **attributes: Any) -> Callable[[Command], Command]:
    """Return an option that takes one of these choices, and shows its default in the help."""
    return click.option(*names, type=click.Choice(list(choices)), show_default=True, **attributes)


def since(text: str) -> datetime:
    """Return the time that a text means, in UTC unless it has an offset, or a number of hours or days before now."""
    if age := re.fullmatch(r"([0-9]{1,5})([hd])", text):
        return datetime.now(UTC) - timedelta(hours=int(age[1]) * (24 if age[2] == "d" else 1))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter("expected a time such as 2026-11-30T12:00:00, in UTC, or an age such as 24h or 7d") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


since_option = click.option(
    "--since",
    metavar="TIME",
    type=since,
    help="Only decisions since TIME: 2026-11-30 or 2026-11-30T12:00:00, in UTC, or an age such as 24h or 7d.",
)


class _Label(BaseModel):
    trace_id: str
    good: bool


def read_labels(_: Any, __: Any, name: str | None) -> dict[str, bool] | None:
    """Read the file of an option, with lines such as ``{"trace_id": …, "good": true}``; return labels by trace id."""
    if name is None:
        return None
    labels: dict[str, bool] = {}
    size_bytes = contradicting = 0
    try:
        with open_input(name) as stream:
            for number, line in lines_in(stream, _MOST_LINE_BYTES):
                size_bytes += len(line)
                if size_bytes > _MOST_BYTES:
                    raise click.BadParameter(f"expected at most {_MOST_BYTES} bytes")
                try:
                    label = _Label.model_validate_json(line.removeprefix(codecs.BOM_UTF8), strict=True)
                except ValidationError as error:
                    first = error.errors(include_input=False)[0]
                    problem = f"{first['loc'][0]}: {first['msg']}" if first["loc"] else "expected a JSON object"
                    raise click.BadParameter(f"line {number}: {problem}") from None
                contradicting += labels.get(label.trace_id, label.good) != label.good
                # The last one counts, as in the ledger.
                labels[label.trace_id] = label.good
    except click.BadParameter as error:
        # Drop the hint at FILE, so that click names the option.
        raise click.BadParameter(error.message) from None
    note_count(contradicting, "labels contradict an earlier one of the same trace: the latest counts")
    return labels


labels_option = click.option(
    "--labels",
    metavar="FILE|-",
    callback=read_labels,
    type=click.Path(allow_dash=True),
    help="File of labels, one JSON object on each line.",
)
outcome_option = click.option(
    "--outcome", type=click.Choice(KINDS), help="Only decisions with this outcome, or revisions; by default all but revisions."
)
group_option = click.option(
    "--group", metavar="NAME", default="", help="Consumer group to read streams as; it is created if it is missing."
)
follow_option = click.option("--follow", is_flag=True, help="Wait for more decisions until Ctrl-C, also through outages.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def settings_options(command: Command) -> Command:
    """Add the flags for settings to a command, and pass it the loaded ``settings``."""

    @click.option(
        "--config",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="TOML file with settings; by default the one that KP_CONFIG names.",
    )
    @click.option("--set", "assignments", multiple=True, metavar="SECTION.NAME=VALUE", help="Override one setting; repeatable.")
    @wraps(command)
    def with_settings(config: Path | None, assignments: tuple[str, ...], **kwargs: Any) -> int | None:
        urls = {"broker.url": kwargs.pop("broker_url", None), "redis.url": kwargs.pop("redis_url", None)}
        flags = dict(map(_parsed, assignments)) | {name: url for name, url in urls.items() if url}
        settings = load_settings(flags, config)
        configure_logs(settings.log)
        return command(settings=settings, **kwargs)

    return with_settings


def service_options(command: Command) -> Command:
    """Add the options of ``ledger_options`` to a command that always uses the broker or Redis, and set both URLs."""

    @wraps(command)
    def with_services(settings: Settings, **kwargs: Any) -> int | None:
        return command(settings=with_endpoints(settings), **kwargs)

    return ledger_options(with_services)


def ledger_options(command: Command) -> Command:
    """Add the options of ``settings_options`` and flags for the URLs to a command that may read the ledger."""
    redis = click.option(
        "--redis-url",
        metavar="URL",
        help="Redis with the novelty log and the ledger (KP_REDIS_URL); by default the broker, if that is a Redis.",
    )
    broker = click.option(
        "--broker-url",
        metavar="URL",
        help="Broker (KP_BROKER_URL); by default the Redis of --redis-url, or else the one that `up` runs.",
    )
    return broker(redis(settings_options(command)))


def _parsed(assignment: str) -> tuple[str, Any]:
    """Return name and value of a ``--set``. Tables and lists are written as JSON, as in variables; other values as text."""
    name, equals, value = assignment.partition("=")
    # The error does not quote the text: without a name it may be a URL with a password.
    if not equals or not re.fullmatch(r"\w+\.\w+", name):
        raise click.BadParameter("expected SECTION.NAME=VALUE, such as novelty.max_elements=500", param_hint="--set")
    if not value.lstrip().startswith(("{", "[")):
        return name, value
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        raise SettingsError(f"{name}: expected a JSON object or array") from None
