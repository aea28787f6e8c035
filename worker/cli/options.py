"""Options that several commands share."""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from worker.errors import SettingsError
from worker.settings import Settings, load_settings


def _parsed(name: str, value: str) -> Any:
    """Tables are written as JSON, as they are in variables; everything else as it is."""
    if not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise SettingsError(f"{name}: expected a JSON object") from None


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags for settings to a command and pass it the loaded ``settings``."""

    @click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings (KP_CONFIG).")
    @click.option("--broker-url", help="The broker (KP_BROKER_URL); by default the embedded Redis that `up` runs.")
    @click.option("--redis-url", help="Redis of the novelty log and the ledger (KP_REDIS_URL); by default the broker's.")
    @click.option("--set", "assignments", multiple=True, metavar="SECTION.NAME=VALUE", help="Any other setting; repeatable.")
    @wraps(command)
    def with_settings(
        *args: Any,
        config: Path | None,
        broker_url: str | None,
        redis_url: str | None,
        assignments: tuple[str, ...],
        **kwargs: Any,
    ) -> None:
        flags: dict[str, str] = {}
        for assignment in assignments:
            name, equals, value = assignment.partition("=")
            if not equals:
                raise click.BadParameter(f"expected SECTION.NAME=VALUE, got {assignment!r}", param_hint="--set")
            flags[name] = _parsed(name, value)
        flags |= {name: url for name, url in (("broker.url", broker_url), ("redis.url", redis_url)) if url}
        settings: Settings = load_settings(flags, config)
        command(*args, settings=settings, **kwargs)

    return with_settings
