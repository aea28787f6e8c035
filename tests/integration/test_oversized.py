"""Messages too large for a worker: kept aside, whole, but not without end."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from kp_scorer.broker.redis_transport.queue import RedisQueue
from kp_scorer.broker.task_body import BEGINNING_BYTES
from kp_scorer.cli.main import commands
from kp_scorer.settings import Settings
from kp_scorer.store import Store

MIB = 2**20
QUEUE = RedisQueue("traces", largest_bytes=10)


@pytest.fixture(params=["taken", "swept"])
def set_aside(request: pytest.FixtureRequest, redis_client: redis.Redis) -> Any:
    """Have messages kept aside, in order, in either way that they can be."""

    def take(messages: Sequence[bytes]) -> list[bytes]:
        for message in messages:
            redis_client.lpush(QUEUE.name if request.param == "taken" else QUEUE.taking, message)
            if request.param == "taken":
                QUEUE.take(redis_client, 1)
            else:
                QUEUE.sweep(redis_client, 60_000, (), ())
        kept: Any = redis_client.lrange("traces.oversized", 0, -1)
        return list(kept)

    return take


def test_the_newest_hundred_are_kept(set_aside: Any, redis_client: redis.Redis) -> None:
    messages = [b"message %05d" % number for number in range(103)]
    assert set_aside(messages) == messages[3:]
    assert redis_client.ttl("traces.oversized") > 0


def test_no_more_are_kept_than_their_bytes_allow(set_aside: Any, redis_client: redis.Redis) -> None:
    messages = [bytes([number]) * (24 * MIB) for number in range(4)]
    assert [len(kept) for kept in set_aside(messages)] == [24 * MIB] * 2
    newest: Any = redis_client.lindex("traces.oversized", -1)
    assert newest == messages[-1]
    whole = b"x" * (65 * MIB)
    assert set_aside([whole]) == [whole], "the newest stays whatever its size"
    assert set_aside([b"smaller again"]) == [b"smaller again"]


def test_what_is_kept_is_listed_shown_and_dropped_with_the_dead_letter_of_its_beginning(
    settings: Settings, store: Store, redis_client: redis.Redis
) -> None:
    beginning = b"x" * BEGINNING_BYTES
    redis_client.rpush("traces.oversized", b"another" * 20_000, beginning + b"y" * 1_000)
    for payload in (beginning, b"z" * BEGINNING_BYTES):
        store.dead_letters.bury(payload, "malformed", "message: expected a smaller one")

    def command(name: str, *options: str) -> list[Any]:
        arguments = ["dead-letter", name, *options, "--broker-url", settings.broker.url]
        found = CliRunner().invoke(commands, arguments, catch_exceptions=False)
        return [json.loads(line) for line in found.stdout.splitlines()]

    assert [letter["size_bytes"] for letter in command("list")] == [BEGINNING_BYTES + 1_000, BEGINNING_BYTES]
    assert [letter["payload"][-1] for letter in command("show")] == ["y", "z"]
    assert [letter["state"] for letter in command("drop", "--yes")] == ["dropped"] * 2
    assert redis_client.lrange("traces.oversized", 0, -1) == [b"another" * 20_000]


def test_listing_letters_asks_once_for_all_that_is_kept_and_never_for_a_whole_message(
    alone: tuple[Settings, redis.Redis],
) -> None:
    settings, server = alone
    with Store.open(settings) as store:
        for number in range(60):
            payload = b"%05d" % number + b"x" * (BEGINNING_BYTES - 5)
            store.dead_letters.bury(payload, "malformed", "message: expected a smaller one")
    server.rpush("traces.oversized", b"00007" + b"x" * 8 * MIB)
    server.config_resetstat()
    found = CliRunner().invoke(commands, ["dead-letter", "list", "--broker-url", settings.broker.url], catch_exceptions=False)
    sizes = [json.loads(line)["size_bytes"] for line in found.stdout.splitlines()]
    assert sorted(sizes) == [BEGINNING_BYTES] * 59 + [8 * MIB + 5]
    assert server.info("commandstats")["cmdstat_eval"]["calls"] <= 3, "once for each queue"
    assert server.info("stats")["total_net_output_bytes"] < MIB


def test_stats_show_how_many_there_are(settings: Settings, redis_client: redis.Redis) -> None:
    urls = ["--broker-url", settings.broker.url, "--redis-url", settings.redis.url]

    def shown() -> Any:
        found = CliRunner().invoke(commands, ["stats", *urls], catch_exceptions=False)
        return json.loads(found.stdout)["oversized"]

    assert shown() == 0
    redis_client.rpush("traces.oversized", b"a", b"b")
    assert shown() == 2
