"""What a worker has in flight takes bounded memory, also while the ledger is away and all of it waits."""

import json
import threading
import tracemalloc
from pathlib import Path
from typing import Final

import pytest
import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.wire import arguments_in, largest_body_bytes, largest_message_bytes
from kp_scorer.errors import InvalidTrace
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings

from tests.hostile.conftest import ShippedArena
from tests.support.attacks import Attack, open_queue
from tests.support.changed_settings import with_changed
from tests.support.processes import SMALL_WORKER, start_worker, wait_until
from tests.support.proxy import Proxy
from tests.support.servers import redis_servers

MIB: Final = 2**20
IN_FLIGHT_BYTES: Final = 20_000_000
MESSAGES_BYTES: Final = 240_000_000
"""All their dead letters are kept: somewhat less than the bound on those."""

OUTAGE_S: Final = 5.0
"""In which a worker receives all that it is going to."""

RESIDENT_BYTES: Final = 310 * MIB
"""Such a worker has 140 to 265 MiB here, with copies of the largest message as it reads it; without a bound on what is in
flight it has 320 to 400."""


WIDE: Final = "\U0001f600" + "x" * 16_000_000
"""A text that takes four bytes of memory for each of its own, by its first character."""


@pytest.mark.parametrize("shipped_redis", redis_servers()[:1], indirect=True)
@pytest.mark.parametrize(
    "item",
    [
        {"trace": WIDE},
        {"body": "1", "content-type": "application/json", "properties": {}, "headers": {"x": WIDE}},
        {"body": "1", "content-type": WIDE, "properties": {}, "headers": {}},
    ],
    ids=["in a plain message", "in a header", "in the content type"],
)
def test_a_message_holds_no_more_than_the_bytes_that_it_counts_by(
    settings: Settings, redis_client: redis.Redis, item: dict[str, object]
) -> None:
    redis_client.lpush(settings.queues.traces, json.dumps(item, ensure_ascii=False).encode())
    with make_celery(settings) as app, app.connection_for_read() as connection:
        tracemalloc.start()
        message = connection.default_channel.basic_get(settings.queues.traces)
        with pytest.raises((InvalidTrace, ValueError)):
            arguments_in(message, settings.limits)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert held_bytes < 1.1 * len(message.body) + MIB


@pytest.mark.slow
@pytest.mark.parametrize("shipped_arena", [*redis_servers()[:1], "rabbitmq"], indirect=True)
def test_messages_just_under_the_limit_take_bounded_memory_while_the_ledger_is_away(
    shipped_arena: ShippedArena, tmp_path: Path
) -> None:
    arena = shipped_arena
    limits = arena.settings().limits
    size_bytes = largest_message_bytes(limits) if arena.broker == "redis" else largest_body_bytes(limits)
    bodies = [b"%d" % number + b" " * (size_bytes - 10) for number in range(MESSAGES_BYTES // size_bytes)]
    changed = {"redis.timeout_s": 10.0, "worker.in_flight_bytes": IN_FLIGHT_BYTES, "worker.concurrency": 96}
    settings = arena.settings_of("worker", **changed, **{"broker.timeout_s": 10.0})
    with (
        Proxy(settings.redis.url) as proxy,
        start_worker(with_changed(settings, redis__url=proxy.url), tmp_path / "worker.log", command=SMALL_WORKER) as worker,
    ):
        proxy.refuse()
        with open_queue(arena) as put:
            for body in bodies:
                put(Attack("", body, {}, {"no envelope": True} if arena.broker == "redis" else {}))
        wait_until(lambda: worker.events("message_waits"))
        # There is nothing to wait for: a worker must not receive more.
        threading.Event().wait(OUTAGE_S)
        proxy.accept()
        with Store.open(arena.settings(redis__timeout_s=10.0)) as store:
            wait_until(lambda: len(list(store.dead_letters.read())) == len(bodies))
        assert worker.peak_bytes() < RESIDENT_BYTES
