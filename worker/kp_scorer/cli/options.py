"""Options that several commands share."""

import json
import re
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import click

from kp_scorer.broker.celery_app import warn_of_celery_variables
from kp_scorer.errors import SettingsError
from kp_scorer.logs import configure_logs
from kp_scorer.settings import Settings, config_file, load_settings, variables_given
from kp_scorer.store.endpoints import with_endpoints

Command = Callable[..., None]


def settings_options(command: Command) -> Command:
    """Add the flags for settings to a command, and pass it the loaded ``settings``."""

    @click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings (KP_CONFIG).")
    @click.option("--set", "assignments", multiple=True, metavar="SECTION.NAME=VALUE", help="Any other setting; repeatable.")
    @wraps(command)
    def with_settings(*args: Any, config: Path | None, assignments: tuple[str, ...], **kwargs: Any) -> None:
        urls = {"broker.url": kwargs.pop("broker_url", None), "redis.url": kwargs.pop("redis_url", None)}
        flags = dict(map(_assigned, assignments)) | {name: url for name, url in urls.items() if url}
        settings = load_settings(flags, config)
        configure_logs(settings.log)
        command(*args, settings=settings, **kwargs)

    return with_settings


def service_options(command: Command) -> Command:
    """Like ``settings_options``, for a command that uses the broker or Redis: with flags for the URLs, and both filled in."""

    @wraps(command)
    def with_services(*args: Any, settings: Settings, **kwargs: Any) -> None:
        warn_of_celery_variables()
        command(*args, settings=with_endpoints(settings), **kwargs)

    return _with_urls(
        settings_options(with_services),
        "The broker (KP_BROKER_URL); by default the embedded Redis that `up` runs.",
        "Redis of the novelty log and the ledger (KP_REDIS_URL); by default the broker's.",
    )


def ledger_options(when: str) -> Callable[[Command], Command]:
    """Like ``settings_options``, for a command that reads the ledger only ``when`` it is told to: with flags for the URLs."""

    def with_ledger(command: Command) -> Command:
        return _with_urls(
            settings_options(command),
            f"{when}: the broker (KP_BROKER_URL).",
            f"{when}: Redis of the ledger (KP_REDIS_URL); by default the broker's.",
        )

    return with_ledger


def _with_urls(command: Command, broker: str, redis: str) -> Command:
    """Add the flags for the URLs, which ``settings_options`` takes, each with what it says of itself."""
    return click.option("--broker-url", help=broker)(click.option("--redis-url", help=redis)(command))


def has_config() -> bool:
    """Whether the command that runs was given a file of settings."""
    return config_file(click.get_current_context().params["config"]) is not None


def overruled(file: str, names: Collection[str]) -> Iterator[str]:
    """Say which variables and flags of the command that runs would win over a file that has settings of these dotted names."""
    flags = (assignment.partition("=")[0] for assignment in click.get_current_context().params["assignments"])
    winners = [*variables_given(names), *(f"--set {name}" for name in dict.fromkeys(flags) if name in names)]
    if winners:
        yield f"for a worker {' and '.join(winners)} would win over {file}"


def _assigned(assignment: str) -> tuple[str, Any]:
    """Name and value of a ``--set``. Tables are written as JSON, as in variables; other values as they are."""
    name, equals, value = assignment.partition("=")
    # What is no name is not quoted: it may be a URL, with its password.
    if not equals or not re.fullmatch(r"\w+\.\w+", name):
        raise click.BadParameter("expected SECTION.NAME=VALUE, such as novelty.max_elements=500", param_hint="--set")
    if not value.lstrip().startswith("{"):
        return name, value
    try:
        return name, json.loads(value)
    except ValueError:
        raise SettingsError(f"{name}: expected a JSON object") from None
