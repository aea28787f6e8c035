"""``kp-scorer cache``: show, warm or empty the shared novelty cache."""

import sys
import time
from collections import Counter
from typing import Final

import click

from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, say
from kp_scorer.cli.reading import Reading
from kp_scorer.cli.warming import newest_traces, open_meter, warm_up
from kp_scorer.settings import Settings
from kp_scorer.store import RedisLog, Store

_LOOKED_AT: Final = 1_000
"""Of how many of the newest entries the domains are counted: a megabyte and a half for Redis to send."""
_NAMED: Final = 3
_MOST: Final = 0.5


@click.group()
def cache() -> None:
    """Show, warm or empty the shared novelty cache.

    Example: kp-scorer cache info
    """


@cache.command(epilog="Example: kp-scorer cache info")
@service_options
def info(settings: Settings) -> None:
    """Print a JSON line for each space: size, age of the oldest entry, bytes in Redis, model, window, busiest domains.

    The domains are those of the newest 1,000 entries, as far as they are decided, each with its share. Says so if one has more
    than half of them.
    """
    with Store.open(settings) as store:
        for log in store.novelty_logs():
            found = log.info()
            domains = _busiest_domains(store, log)
            print_json(
                {
                    "space": found.space,
                    "model": found.space.rpartition("-")[0],
                    "vectors": found.vector_type,
                    "entries": found.entries,
                    "oldest_age_s": round(time.time() - found.oldest.time_ms / 1_000, 1) if found.oldest else None,
                    "bytes": found.bytes,
                    "window": found.window.as_settings() if found.window else None,
                    "domains": domains,
                }
            )
            for domain, share in domains.items():
                if share > _MOST:
                    say(
                        f"{found.space}: {share:.0%} of the newest decided entries are of the domain {domain}; "
                        "who fills the window makes repeats seem new"
                    )


def _busiest_domains(store: Store, log: RedisLog) -> dict[str, float]:
    """The domains that have the most of a log's newest entries, with their shares of those that are decided."""
    decided = [found.decision.domain for found in store.ledger.decided(log.newest(_LOOKED_AT)) if found]
    return {domain: round(count / len(decided), 3) for domain, count in Counter(decided).most_common(_NAMED)}


@cache.command(epilog="Example: kp-scorer cache warm traces.jsonl --set novelty.recipe=asked_and_did")
@click.argument("file", metavar="FILE|-", type=click.Path(allow_dash=True))
@click.option("--yes", is_flag=True, help="Add to entries that are there already.")
@service_options
def warm(file: str, yes: bool, settings: Settings) -> None:
    """Fill the cache of a new space, before workers with another model, recipe or type of vectors come to compare in it.

    Embeds the last novelty.max_elements traces in FILE (- for standard input), which is as for `submit`, with the settings that
    those workers will have, and decides nothing. Entries count as new from now on. A trace that is submitted later is never
    compared with its own entry.

    Where the space has entries already it is refused without --yes: more of them push those out of the window. Prints a JSON
    line for each trace that is invalid or whose id was taken by another content, and one with the space, how many traces it was
    warmed with, and how many entries it has.
    """
    with Store.open(settings) as store:
        meter = open_meter(store, settings)
        log = store.novelty_log(meter.embedder.space)
        if (held := log.info().entries) and not yes:
            raise click.UsageError(f"{log.space} has {held} entries already; with --yes these traces are added to them")
        reading = Reading(file, settings.limits, settings.worker.batch_size)
        lines, invalid = newest_traces(reading, settings.novelty.max_elements)
        conflicts = warm_up(store, meter, lines, settings.worker.batch_size)
        print_json({"space": log.space, "warmed": len(lines) - conflicts, "entries": log.info().entries})
    if not lines:
        say(f"no traces in {file}")
    if invalid or conflicts:
        sys.exit(1)


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
