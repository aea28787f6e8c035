"""``kp-scorer audit``, ``forget`` and ``cache``: look into the novelty log, and take things out of it."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import click
import redis

from worker.audit import audit as audit_log
from worker.cli.options import settings_options
from worker.cli.output import print_json, progress, say
from worker.dead_letters import DeadLetters
from worker.embedded import with_endpoints
from worker.keys import Keys
from worker.ledger import RedisLedger
from worker.novelty import RedisLog, Window
from worker.redis_client import connect
from worker.settings import Settings


class _Store(NamedTuple):
    """Everything of ours in Redis."""

    logs: list[RedisLog]
    ledger: RedisLedger
    dead_letters: DeadLetters
    window: Window


def _with_store(settings: Settings, use: Callable[[_Store], None]) -> None:
    settings = with_endpoints(settings)
    keys, window = Keys(settings.redis.prefix), Window.of(settings.novelty)
    record_ttl_ms = settings.ledger.ttl_ms
    with ExitStack() as closing:
        client: redis.Redis = closing.enter_context(connect(settings.redis))
        logs = RedisLog.of_all_spaces(client, keys, window, record_ttl_ms)
        use(_Store(logs, RedisLedger(client, keys, record_ttl_ms), DeadLetters(client, keys, record_ttl_ms), window))


@click.command(epilog="Example: kp-scorer audit && echo every decision is what the log gives")
@settings_options
def audit(settings: Settings) -> None:
    """Recompute every decision's novelty from the log and report those that differ.

    Prints a JSON line for each difference; exits 1 if there is any. Use the settings that the workers use.
    """
    differing = 0

    def use(store: _Store) -> None:
        nonlocal differing
        if not store.logs:
            say("there is no novelty log")
        for log in store.logs:
            space = log.info().space
            with progress("audited") as advance:
                report = audit_log(log, store.ledger, store.window, advance)
            for difference in report.differences:
                print_json({"space": space, **difference._asdict()})
            differing += len(report.differences)
            say(
                f"{space}: {report.entries} entries, {report.agreeing} agree, {len(report.differences)} differ, "
                f"{report.undecided} undecided, {report.beyond} beyond what the log still holds"
            )

    _with_store(settings, use)
    if differing:
        sys.exit(1)


@click.command(epilog="Example: kp-scorer forget kp:trace:4f1c…")
@click.argument("trace_id")
@settings_options
def forget(trace_id: str, settings: Settings) -> None:
    """Erase a trace: its vector, its record with the decision, its dead letters.

    Workers drop it with their next batch, idle ones within a second.

    What is on a queue is not touched: a trace still waiting there is scored when its turn comes.
    """

    def use(store: _Store) -> None:
        vectors = sum(log.erase(trace_id) for log in store.logs)
        letters = sum(
            store.dead_letters.drop(letter.letter_id) for letter in store.dead_letters.read() if letter.trace_id == trace_id
        )
        # Last: it tells where the vectors are, should this be interrupted and have to be done again.
        records = store.ledger.erase(trace_id)
        print_json({"trace_id": trace_id, "vectors": vectors, "records": records, "dead_letters": letters})

    _with_store(settings, use)


@click.group()
def cache() -> None:
    """Show or empty the shared novelty cache.

    Example: kp-scorer cache info
    """


@cache.command(epilog="Example: kp-scorer cache info")
@settings_options
def info(settings: Settings) -> None:
    """Print a JSON line for each space: size, age of the oldest entry, bytes in Redis, model."""

    def use(store: _Store) -> None:
        for log in store.logs:
            found = log.info()
            print_json(
                {
                    "space": found.space,
                    "model": found.space.rpartition("-")[0],
                    "vectors": found.vector_type,
                    "entries": found.entries,
                    "oldest_age_s": round(time.time() - found.oldest.time_ms / 1_000, 1) if found.oldest else None,
                    "bytes": found.bytes,
                }
            )

    _with_store(settings, use)


@cache.command(epilog="Example: kp-scorer cache clear --yes")
@click.option("--yes", is_flag=True, help="Do not ask.")
@settings_options
def clear(yes: bool, settings: Settings) -> None:
    """Empty the cache: what is scored next is compared with nothing. Decisions stay."""

    def use(store: _Store) -> None:
        for log in store.logs:
            found = log.info()
            if yes or click.confirm(f"Remove the {found.entries} entries of {found.space}?", err=True):
                log.clear()
                say(f"removed {found.entries} entries of {found.space}")

    _with_store(settings, use)
