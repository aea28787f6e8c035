"""`stats` shows how much of Redis' memory each part takes."""

import json
import random
import time
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from kp_scorer.broker.backlog import look_at_backlog
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.settings import Settings
from kp_scorer.spans.context import NO_CONTEXT
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Submission
from kp_scorer.store.runs import ReceivedSpan
from kp_scorer.store.store import WorkerReport

from tests.support.builders import candidate, decision, store_decisions
from tests.support.changed_settings import settings_at
from tests.support.commands import command
from tests.support.servers import RedisServer, redis_servers
from tests.support.traces import rows_in

EACH: Final = 600
SPACE: Final = "space"
KEYS: Final = Keys("kp")
PATTERNS: Final = {
    "records": ("kp:trace:*", "kp:pending"),
    "log": ("kp:log:*",),
    "queues": ("traces*",),
    "decisions": ("decisions.*",),
    "dead_letters": ("kp:dead*",),
    "runs": ("kp:run*",),
}
"""The patterns of each part's keys."""


def used_bytes(client: redis.Redis) -> int:
    """Return the memory that Redis uses once it is stable, as Redis measures its clients' buffers only once a second."""
    # Redis 8 also counts the garbage that Lua has not collected yet.
    client.script_flush()
    readings = [_used_bytes(client)]
    while len(readings) < 2 or abs(readings[-1] - readings[-2]) > 1_000:
        time.sleep(1)
        readings.append(_used_bytes(client))
    return readings[-1]


def _used_bytes(client: redis.Redis) -> int:
    memory: Any = client.info("memory")
    # Data that a slow disk has not yet written to the file belongs to no part.
    return int(memory["used_memory"] - memory["mem_aof_buffer"] - memory["mem_clients_normal"])


def fill(settings: Settings, client: redis.Redis, count: int) -> None:
    """Store ``count`` items of each kind, but only a third as many log entries and runs."""
    sizes = random.Random(7)

    def text() -> str:
        return "x" * sizes.randrange(2_000, 4_000)

    ids = [f"kp:trace:{number}" for number in range(count)]
    with Store.open(settings) as store, make_celery(settings) as app:
        store_decisions(store, {each: decision(each).model_dump_json().encode() for each in ids})
        store.novelty_log(SPACE).append(
            [candidate(f"{each}-placed", number, 384) for number, each in enumerate(ids[: count // 3])], None
        )
        store.ledger.submit([Submission(f"{each}-waits", bytes(16), text().encode()) for each in ids])
        for each in ids:
            why = DeadLettering("scoring_failed", "detail", f"{each}-dead", bytes(16))
            store.dead_letters.dead_letter(json.dumps([each, text()]).encode(), why)
        for number in range(count // 3):
            spans = [ReceivedSpan(f"{span:016x}", text().encode()) for span in range(8)]
            store.runs.store(f"{number:032x}", spans)
            if number % 2:
                store.runs.finish(f"{number:032x}", "submitted")
        publisher = Publisher(app, settings, store)
        published = [publisher.publication(decision(each), NO_CONTEXT, None, set()) for each in ids]
        assert not any(publisher.publish_all(published))
        for start in range(0, count, 500):
            client.lpush("traces", *(json.dumps([each, text()]) for each in ids[start : start + 500]))


@pytest.mark.parametrize("via", ["queue", "stream"])
@pytest.mark.parametrize("executable", redis_servers())
def test_the_parts_add_up_to_what_is_used_and_each_is_what_its_keys_take(executable: str, via: str, tmp_path: Path) -> None:
    with RedisServer(tmp_path, executable) as server, server.connect() as client:
        settings = settings_at(server.url, results__via=via, serve__total_bytes=2**30, serve__keep_spans_s=600.0)
        with Store.open(settings) as store, make_celery(settings) as app:
            report = WorkerReport(node="worker", space=SPACE)
            # Load all scripts now, so that their memory counts in both measurements.
            fill(settings, client, 3)
            look_at_backlog(app, settings, store, [report])
            client.flushall()
            client.set("other", "application")
            empty = used_bytes(client)
            fill(settings, client, EACH)
            filled = used_bytes(client)
            measured = look_at_backlog(app, settings, store, [report]).used_by_part["redis"]
            assert measured.keys() == {*PATTERNS, "other"}
            assert sum(measured[part] for part in PATTERNS) == pytest.approx(filled - empty, rel=0.05)
            for part, patterns in PATTERNS.items():
                names: list[Any] = [name for pattern in patterns for name in client.keys(pattern)]
                # Ask Redis for the memory of the keys. Deleting them would free the same amount only if Redis resized no table.
                taken: list[Any] = [client.memory_usage(name, samples=0) for name in names]
                assert measured[part] == pytest.approx(sum(taken), rel=0.1), part
                client.delete(*names)
            assert look_at_backlog(app, settings, store, [report]).used_by_part["redis"]["records"] == 0
        (row,) = rows_in(command(settings, "stats").stdout)
        assert row["bytes"]["redis"].keys() == {*PATTERNS, "other"}
