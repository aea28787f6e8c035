"""``kp-scorer cache``: show or empty the shared novelty cache."""

import time

import click

from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, say
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.group()
def cache() -> None:
    """Show or empty the shared novelty cache.

    Example: kp-scorer cache info
    """


@cache.command(epilog="Example: kp-scorer cache info")
@service_options
def info(settings: Settings) -> None:
    """Print a JSON line for each space: size, age of the oldest entry, bytes in Redis, model, window."""
    with Store.open(settings) as store:
        for log in store.novelty_logs():
            found = log.info()
            print_json(
                {
                    "space": found.space,
                    "model": found.space.rpartition("-")[0],
                    "vectors": found.vector_type,
                    "entries": found.entries,
                    "oldest_age_s": round(time.time() - found.oldest.time_ms / 1_000, 1) if found.oldest else None,
                    "bytes": found.bytes,
                    "window": found.window.as_settings() if found.window else None,
                }
            )


@cache.command(epilog="Example: kp-scorer cache clear --yes")
@click.option("--yes", is_flag=True, help="Do not ask.")
@service_options
def clear(yes: bool, settings: Settings) -> None:
    """Empty the cache: what is scored next is compared with nothing. Decisions stay."""
    with Store.open(settings) as store:
        for log in store.novelty_logs():
            found = log.info()
            if yes or click.confirm(f"Remove the {found.entries} entries of {found.space}?", err=True):
                log.clear()
                say(f"removed {found.entries} entries of {found.space}")
