"""A Redis that submissions have filled accepts no more of them until workers have emptied it; bad configuration is reported."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from kombu.exceptions import OperationalError
from kp_scorer import score_traces
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.cli.commands.cache import warm_up
from kp_scorer.client import Client
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store
from kp_scorer.store.condition import shortcomings
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Identity
from kp_scorer.store.store import WorkerReport

from tests.support.builders import decision, store_decisions
from tests.support.changed_settings import settings_at, with_changed
from tests.support.commands import command
from tests.support.outcomes import publish, published
from tests.support.processes import PATIENCE_S, at_work, wait_until
from tests.support.servers import RedisServer
from tests.support.traces import short_traces
from tests.support.word_embedder import WordEmbedder

LIMIT_BYTES: Final = 30_000_000
MOST: Final = 2_000
"""The number of traces to submit, which is more than Redis has room for."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as started:
        started.limit_memory(LIMIT_BYTES)
        yield started


@pytest.fixture
def endpoints(server: RedisServer) -> Settings:
    return settings_at(server.url)


def large_traces(seed: int) -> list[dict[str, Any]]:
    """Return traces of some 50 kB each, of which Redis has room for a few hundred."""
    traces = short_traces(MOST, seed)
    for trace in traces:
        trace["steps"] = [{"step_id": 0, "type": "thought", "content": "a" * 50_000}]
    return traces


def fill_by_client(settings: Settings, traces: Sequence[dict[str, Any]]) -> list[str]:
    """Submit until the client refuses, while Redis still has room for the workers."""
    with Client(settings) as client:
        accepted, error = until_refused(client.submit, traces)
    assert "ledger: Redis is nearly full" in str(error)
    return accepted


def fill_by_force(settings: Settings, traces: Sequence[dict[str, Any]]) -> list[str]:
    """Put tasks on the queue as other producers do, until Redis itself refuses them."""
    with make_celery(settings) as app:
        send = partial(app.send_task, TASK_NAME, queue=settings.queues.first, ignore_result=True, retry=False)
        accepted, error = until_refused(lambda trace: send(args=[trace]), traces)
    assert "maxmemory" in str(error)
    return accepted


def until_refused(send: Callable[[Any], Any], traces: Sequence[dict[str, Any]]) -> tuple[list[str], Exception]:
    """Send traces one after another; return the ids of those that were accepted, and the error that ended this."""
    for number, trace in enumerate(traces):
        try:
            send(trace)
        except (ServiceUnavailable, OperationalError) as error:
            assert number > 10
            return [str(trace["id"]) for trace in traces[:number]], error
    raise AssertionError("nothing was refused")


def test_a_worker_started_on_a_full_redis_empties_it(server: RedisServer, endpoints: Settings, tmp_path: Path) -> None:
    submitted = fill_by_client(endpoints, large_traces(seed=1))
    assert 0.85 < server.used_bytes() / LIMIT_BYTES < 0.95
    submitted += fill_by_force(endpoints, large_traces(seed=2))
    with at_work(endpoints, tmp_path) as (worker, client), Store.open(endpoints) as store:
        wait_until(lambda: store.ledger.counts().decided == len(submitted))
        # Once the worker has emptied the queue, there is room again without anybody's help.
        (trace,) = short_traces(1, seed=3)
        submitted.append(client.submit(trace))
        client.wait(submitted[-1], timeout_s=PATIENCE_S)
        assert store.ledger.counts() == (len(submitted), 0, len(submitted), 0)
    assert "Traceback" not in worker.text()
    assert worker.process.returncode == 0
    assert {decision["trace_id"] for decision in published(endpoints)} == set(submitted)


def test_memory_that_redis_does_not_count_against_its_limit_refuses_no_submission(
    server: RedisServer, endpoints: Settings, tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "replica") as replica:
        replica.follow(server)
        # Data that a replica has not received takes memory beyond maxmemory, as does data that a slow disk has not written yet.
        replica.pause()
        fill_by_client(endpoints, large_traces(seed=1))
        assert 0.85 < server.used_bytes() / LIMIT_BYTES < 0.95
        with Store.open(endpoints) as store:
            assert 0.85 < (store.condition().memory_used or 0.0) < 0.95


def test_an_operator_sees_the_workers_and_makes_room_on_a_full_redis(server: RedisServer, endpoints: Settings) -> None:
    (decision,) = score_traces(short_traces(1, seed=5), load_settings({"embedding.embedder": "none"}))
    with Store.open(endpoints) as store, make_celery(endpoints) as app, server.connect() as client:
        for number in range(3):
            store.dead_letters.dead_letter(b"%d" % number, DeadLettering("invalid", "$", f"kp:trace:{number}"))
        publish(Publisher(app, endpoints, store), decision)
        client.lpush(endpoints.queues.name("rejected"), "foreign")
        # Even an empty Redis uses more memory than this.
        server.limit_memory(1_000)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("one", "more")
        for in_flight in (1, 2):
            store.ledger.renew(WorkerReport(node="one", in_flight=in_flight).model_dump_json())
        assert store.worker_reports() == [WorkerReport(node="one", in_flight=2)]
        for asked in ("dead-letter list", "forget kp:trace:1", "dead-letter drop --yes", "stats"):
            done = command(endpoints, *asked.split())
            assert done.exit_code == 0, done.output
        assert list(store.dead_letters.read()) == []
        assert [each["trace_id"] for each in published(endpoints)] == [decision.trace_id]
        # The one item on the queue that was not a decision has become a dead letter.
        assert [letter.size_bytes for letter in store.dead_letters.read()] == [len("foreign")]


def test_messages_that_have_come_back_are_read_while_redis_is_full(server: RedisServer, endpoints: Settings) -> None:
    with Store.open(endpoints) as store:
        server.limit_memory(1)
        assert [store.dead_letters.begin_reading(b"{}") for _ in range(2)] == [1, 2]
        store.dead_letters.end_reading(b"{}")
        assert store.dead_letters.begin_reading(b"{}") == 1


def test_warming_leaves_workers_the_room_that_they_need_in_a_full_redis(server: RedisServer, endpoints: Settings) -> None:
    numbered = [(1, decode_trace(trace, endpoints.limits)) for trace in short_traces(1, seed=6)]
    embedder = WordEmbedder()
    with Store.open(endpoints) as store:
        log = store.novelty_log(embedder.space)
        meter = NoveltyMeter(embedder, log, endpoints.novelty.window())
        server.limit_memory(1_000)
        with pytest.raises(ServiceUnavailable, match="Redis is nearly full"):
            warm_up(store, meter, numbered)
        assert log.info().entries == 0


def test_a_worker_that_the_broker_refuses_logs_it_once_a_second(
    server: RedisServer, endpoints: Settings, tmp_path: Path
) -> None:
    with server.connect() as client:
        client.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-evalsha")
    limited = with_changed(endpoints, broker__url=server.url.replace("//", "//limited:secret@"))
    with at_work(limited, tmp_path, ready=False) as (worker, _):
        lines = wait_until(lambda: (events := worker.events("service_unavailable"))[3:] and events)
        first, fourth = (datetime.fromisoformat(lines[place]["timestamp"]) for place in (0, 3))
        # Starting anew after each refusal takes some moments, too, so this has no upper bound.
        assert (fourth - first).total_seconds() > 2.9
        assert {line["service"] for line in lines} == {"broker"}
        assert all(re.fullmatch(r"the broker refuses: NOPERM .*'evalsha'.*", line["detail"]) for line in lines)
        with server.connect() as client:
            client.execute_command("ACL", "SETUSER", "limited", "+evalsha")
        (trace,) = short_traces(1, seed=4)
        with Client(endpoints) as client:
            client.wait(client.submit(trace), timeout_s=PATIENCE_S)


def test_a_worker_names_each_unsuitable_setting_of_its_redis_and_the_remedy(
    settings: Settings, limit_memory: Callable[[int], object], tmp_path: Path
) -> None:
    limit_memory(10**9)
    with RedisServer(tmp_path) as server, server.connect() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
        with at_work(with_changed(settings, broker__url=server.url), tmp_path) as (worker, _):
            shortages = [
                (line["service"], line["detail"].partition(": set ")[2]) for line in worker.logged("redis_unsuitable", 3)
            ]
    assert shortages == [("broker", "maxmemory-policy noeviction"), ("broker", "maxmemory"), ("broker", "appendonly yes")]


def test_stats_says_that_an_evicting_redis_has_lost_records(server: RedisServer, endpoints: Settings) -> None:
    stored = {f"kp:trace:{number}": decision(f"kp:trace:{number}").model_dump_json().encode() for number in range(500)}
    with Store.open(endpoints) as store, server.connect() as client:
        store.ledger.acquire([Identity(trace_id, bytes(16)) for trace_id in stored])
        assert command(endpoints, "stats").stderr == ""
        # Redis must evict only this key: if it evicted records too, the counts might agree again.
        counts_key = Keys(endpoints.redis.prefix).counts
        client.config_set("maxmemory-policy", "volatile-lru")
        client.expire(counts_key, 86_400)
        server.limit_memory(server.used_bytes() + 100_000)
        while client.exists(counts_key):
            with suppress(redis.exceptions.OutOfMemoryError):
                client.lpush("fillers", "x" * 10_000)
        server.limit_memory(LIMIT_BYTES)
        store_decisions(store, stored)
    asked = command(endpoints, "stats")
    counts = json.loads(asked.stdout)
    assert (asked.exit_code, counts["submitted"] < counts["decided"]) == (0, True)
    lost = f"the ledger has lost records: submitted {counts['submitted']} is not pending + decided + dead, "
    assert lost in asked.stderr
    # If Redis evicts records together with the counts, this figure alone shows the loss.
    assert re.search(r"redis has evicted [1-9]\d* keys? since it started, which may be records", asked.stderr)


def test_memory_is_unknown_to_a_user_who_may_not_ask_for_it(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.connect() as client:
        client.config_set("maxmemory", 10**9)
        client.acl_setuser("kept-out", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"])
        kept_out = server.url.replace("redis://", "redis://kept-out:any@")
        for url, is_allowed in ((server.url, True), (kept_out, False)):
            with Store.open(settings_at(url)) as store:
                assert (store.condition().memory_used is not None) == is_allowed
                assert 0 <= (store.condition().memory_used or 0.0) < 0.1


@pytest.mark.parametrize("shift_s", [-3_600, 0, 3_600])
def test_a_redis_whose_clock_is_not_that_of_the_machine_is_named(
    shift_s: int, settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() - shift_s)
    named = [each for each in store.condition().others if "clock" in each]
    assert [each.partition(" that of")[0] for each in named] == (
        [f"its clock is 3600 s {'ahead of' if shift_s > 0 else 'behind'}"] if shift_s else []
    )


@pytest.mark.parametrize(
    ("version", "is_old"), [("5.0.14", True), ("6.0.20", True), ("6.2.0", False), ("7.0.15", False), ("10.0.1", False)]
)
def test_a_redis_that_is_too_old_is_named(version: str, is_old: bool) -> None:
    well = {"maxmemory": 1, "used_memory": 0, "maxmemory_policy": "noeviction", "aof_enabled": 1}
    assert list(shortcomings(well | {"redis_version": version})) == (
        [f"Redis {version} is too old: install 6.2 or later"] if is_old else []
    )


@pytest.mark.parametrize(("clients", "is_nearly_full"), [(799, False), (800, True)])
def test_a_redis_that_soon_refuses_clients_is_named(clients: int, is_nearly_full: bool) -> None:
    well = {"redis_version": "7.0.15", "maxmemory": 1, "used_memory": 0, "maxmemory_policy": "noeviction", "aof_enabled": 1}
    named = list(shortcomings(well | {"connected_clients": clients, "maxclients": 1_000}))
    assert named == ([f"{clients} clients are connected of 1000, and further ones refused: raise maxclients"] * is_nearly_full)
