"""The operator's view of workers: `kp-scorer health`, `stats` and `doctor`, the dashboard, the alerts, Prometheus."""

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import redis
import yaml
from celery import Celery
from kp_scorer.broker.backlog import Backlog, UnreadDecisions
from kp_scorer.broker.calls import declare_queues
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.queues import results_queue
from kp_scorer.cli.main import commands
from kp_scorer.decision import Decision, Dimensions
from kp_scorer.errors import REASONS, BrokerBlocked
from kp_scorer.novelty import Candidate
from kp_scorer.process.metrics import Metrics
from kp_scorer.report.drift import Drift, drift, time_of
from kp_scorer.serve.counters import ServeMetrics
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store
from kp_scorer.store.condition import Condition
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import SubmissionCounts
from kp_scorer.store.store import WorkerReport
from prometheus_client import generate_latest

from tests.support.builders import decision, first_queues
from tests.support.changed_settings import settings_at, with_changed
from tests.support.commands import command, invoked
from tests.support.documents import anchors_of, code_with, lines_of
from tests.support.processes import (
    CRASHING_WORKER,
    FAST_WORKER,
    LISTENING,
    PATIENCE_S,
    at_work,
    ending_within,
    free_port,
    start_worker,
    wait_until,
)
from tests.support.prometheus import DASHBOARD, RULES, Samples, program, running_prometheus, samples_of, scraped, values_of
from tests.support.rabbitmq import OwnNode, RabbitMQ
from tests.support.servers import RedisServer
from tests.support.traces import fresh_samples, rows_in

LOOKS_OFTEN: Final = {"CONSTANTS": "process.maintenance._LOOK_EVERY_S=0.5"}
"""Variables that have a worker look at its servers and queues twice a second, instead of every ten seconds."""


def health(port: int, *options: str) -> tuple[int, list[str]]:
    """Ask for the worker's health as a supervisor does; return the exit code and the reasons."""
    done = invoked(commands, "health", *options, env={"KP_METRICS_PORT": str(port)})
    row = json.loads(done.stdout)
    asked = "ready" if options else "live"
    assert row[asked] == (done.exit_code == 0)
    assert [f"not {asked}: {reason}" for reason in row["reasons"]] == done.stderr.splitlines()
    return done.exit_code, row["reasons"]


def test_a_worker_that_waits_for_its_redis_is_live_and_not_ready_until_that_is_back(tmp_path: Path) -> None:
    port = free_port()
    probe = partial(health, port)
    assert probe()[0] == 1
    with RedisServer(tmp_path) as server:
        settings = settings_at(server.url, metrics__port=port)
        with start_worker(settings, tmp_path / "worker.log", ready=False, command=FAST_WORKER) as worker:
            wait_until(lambda: probe("--ready")[0] == 0)
            assert probe() == (0, [])
            server.kill()
            reasons = wait_until(lambda: probe("--ready")[1])
            assert {reason.partition(":")[0] for reason in reasons} <= {"redis", "broker"}
            assert probe() == (0, [])
            server.start()
            wait_until(lambda: probe("--ready")[0] == 0)
        assert worker.process.returncode == 0
        assert probe("--ready")[0] == 1


def is_loading(server: RedisServer) -> bool:
    try:
        with server.connect() as client:
            return not client.ping()
    except redis.exceptions.ConnectionError as error:
        return isinstance(error, redis.exceptions.BusyLoadingError)


def test_a_worker_that_starts_while_redis_loads_its_file_waits_for_it(tmp_path: Path) -> None:
    port = free_port()
    probe = partial(health, port)
    with RedisServer(tmp_path) as server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        with server.connect() as client:
            client.eval("for key = 1, 60000 do redis.call('SET', key, '') end", 0)
        server.kill()
        # Loading takes ten seconds, during which Redis still answers several times a second.
        server.launch("key-load-delay 100")
        wait_until(lambda: is_loading(server))
        settings = settings_at(server.url, metrics__port=port)
        variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "CONSTANTS": "WorkerSettings.patience_s=0.2"}
        with at_work(settings, tmp_path, ready=False, variables=variables) as (worker, _):
            (reason,) = wait_until(lambda: [each for each in probe("--ready")[1] if "LOADING" in each])
            assert reason.startswith("it is starting: redis: redis.url: Redis refuses: LOADING")
            assert probe() == (0, [])
            wait_until(lambda: probe("--ready")[0] == 0)
            details = [line["detail"] for line in worker.logged("service_unavailable")]
            assert {re.sub(" (Redis|Valkey) is .*", "", detail) for detail in details} == {"redis.url: Redis refuses: LOADING"}
            assert systemd.recv(4_096) == b"EXTEND_TIMEOUT_USEC=60000000"


def reports(settings: Settings) -> list[WorkerReport]:
    with Store.open(settings) as store:
        return store.worker_reports()


def total(samples: Samples, name: str) -> float:
    """Return the sum of a metric over all labels."""
    return sum(value for sample, value in samples.items() if sample.partition("{")[0] == name)


def test_a_worker_is_shown_with_its_work_and_has_metrics_of_it_and_of_the_backlog(
    settings: Settings, redis_client: redis.Redis, limit_memory: Callable[[int], object], tmp_path: Path
) -> None:
    limit_memory(10**9)
    measured = with_changed(settings, metrics__port=free_port())

    def samples_with(name: str, value: float) -> Samples:
        samples = scraped(measured)
        return samples if total(samples, name) == value else {}

    traces = fresh_samples(20)
    with at_work(measured, tmp_path, variables=LOOKS_OFTEN) as (worker, client):
        client.submit_many(traces)
        redis_client.lpush("traces", '{"@type": "nothing that is known"}')
        assert len(list(client.as_completed([str(trace["id"]) for trace in traces], timeout_s=PATIENCE_S))) == 20
        wait_until(lambda: worker.events("trace_dead"))
        (report,) = wait_until(lambda: [each for each in reports(settings) if each.held.count == 20 and not each.not_ready])
        assert report.node.startswith(f"fast-{worker.process.pid}@")
        assert (report.window_entries, report.queued.count, report.embedder) == (20, 20, "word-hash python")
        assert sum(count for counted in report.decisions.values() for count in counted.values()) == 20
        # Add a worker report that cannot be read, as another version or another program might write it.
        redis_client.zadd(Keys("kp").workers, {"other": time.time() * 1_000 + 5_000})
        redis_client.set(Keys("kp").worker("other"), b"\xff{", px=5_000)
        (shown,) = rows_in(command(settings, "stats").stdout)
        (worker_shown,) = shown["workers"]
        assert (worker_shown["worker"], worker_shown["decided"], worker_shown["not_ready"]) == (report.node, 20, [])
        assert 0 < worker_shown["in_flight_s"] < 60

        samples = wait_until(lambda: samples_with("kp_scorer_decisions_total", 20))
        waited = samples[f'kp_scorer_queue_wait_seconds_count{{queue="{settings.queues.first}"}}']
        assert waited == samples["kp_scorer_processing_seconds_count"] == 20
        assert 0 < samples["kp_scorer_processing_seconds_sum"] < 60
        assert samples["kp_scorer_batch_traces_sum"] == samples["kp_scorer_window_entries"] == 20
        delivered = samples[f'kp_scorer_deliveries_total{{queue="{settings.queues.first}"}}']
        assert (delivered, samples["kp_scorer_redeliveries_total"]) == (21, 0)
        assert (samples["kp_scorer_ready"], samples["kp_scorer_degraded"]) == (1, 0)
        assert samples["kp_scorer_mirror_lag_seconds"] < 10
        samples = wait_until(lambda: samples_with("kp_scorer_queue_messages", 20))
        assert samples['kp_scorer_dead_lettered{reason="invalid"}'] == total(samples, "kp_scorer_dead_lettered") == 1
        assert (samples["kp_scorer_pending"], samples["kp_scorer_oldest_pending_seconds"]) == (0, 0)
        assert samples["kp_scorer_submitted"] == 21
        assert 1e-4 < samples['kp_scorer_redis_memory_used_ratio{server="redis"}'] < 0.1
        parts = {
            part: samples[f'kp_scorer_redis_bytes{{part="{part}",server="redis"}}'] for part in ("records", "log", "other")
        }
        assert all(value > 10_000 for value in parts.values()), parts
    assert worker.process.returncode == 0
    # A worker that has ended is not shown for longer than its lease.
    wait_until(lambda: not reports(settings))


def test_a_worker_that_is_to_have_no_embedder_is_not_degraded(settings: Settings, tmp_path: Path) -> None:
    chosen = with_changed(settings, metrics__port=free_port(), embedding__embedder="none")
    with start_worker(chosen, tmp_path / "worker.log"):
        wait_until(lambda: scraped(chosen)["kp_scorer_ready"] == 1)
        assert scraped(chosen)["kp_scorer_degraded"] == 0


def test_dead_letters_of_a_worker_that_died_are_counted_by_the_next(
    settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    measured = with_changed(settings, metrics__port=free_port(), broker__visibility_timeout_s=3)
    redis_client.lpush("traces", *(f'{{"@type": "nothing that is known", "number": {number}}}' for number in range(3)))
    dying = {"CRASH_AT": "dead", "CRASH_AFTER": "2"}
    with start_worker(measured, tmp_path / "first.log", ready=False, command=CRASHING_WORKER, variables=dying) as worker:
        assert worker.process.wait(PATIENCE_S) == -signal.SIGKILL
    with at_work(measured, tmp_path, variables=LOOKS_OFTEN), Store.open(settings) as store:
        wait_until(lambda: store.dead_letters.count() == 3)
        counted = 'kp_scorer_dead_lettered{reason="invalid"}'
        # Messages that the first worker left unacknowledged come back, and each counts as another occurrence.
        wait_until(lambda: scraped(measured).get(counted) == sum(each.occurrences for each in store.dead_letters.read()))
        (report,) = store.worker_reports()
        assert report.dead_letters < scraped(measured)[counted]


def test_a_redis_that_begins_to_evict_is_logged_measured_and_not_ready(settings: Settings, tmp_path: Path) -> None:
    port = free_port()
    with RedisServer(tmp_path) as server, server.connect() as client:
        split = with_changed(settings, broker__url=server.url, metrics__port=port)
        evicts = 'kp_scorer_redis_evicts{server="broker"}'
        with at_work(split, tmp_path, variables=LOOKS_OFTEN) as (worker, _):
            wait_until(lambda: scraped(split).get(evicts) == 0)
            assert health(port, "--ready") == (0, [])
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("maxmemory", client.info("memory")["used_memory"] + 1_000_000)
            (reason,) = wait_until(lambda: health(port, "--ready")[1])
            assert reason.startswith("broker: it evicts keys when its memory is full (allkeys-lru)")
            details = [line["detail"] for line in worker.logged("redis_unsuitable")]
            assert details.count(reason.removeprefix("broker: ")) == 1
            for number in range(300):
                client.set(f"filler:{number}", "x" * 10_000)
            wait_until(lambda: scraped(split)['kp_scorer_redis_evicted_keys{server="broker"}'] > 0)
            assert scraped(split)[evicts] == 1
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 0)
            wait_until(lambda: health(port, "--ready")[0] == 0)


def test_a_redis_that_cannot_rewrite_its_file_or_became_a_replica_is_named(settings: Settings, tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    with RedisServer(directory) as server, server.connect() as client:
        client.config_set("maxmemory", 10**9)
        apart = with_changed(settings, redis__url=server.url, broker__url=server.url, metrics__port=free_port())
        shortcomings = 'kp_scorer_redis_shortcomings{server="redis"}'
        with at_work(apart, tmp_path, variables=LOOKS_OFTEN) as (worker, _):
            wait_until(lambda: scraped(apart).get(shortcomings) == 0)
            # Simulate a full disk: Redis can create no file, but still writes to the open one.
            shutil.rmtree(directory)
            with suppress(redis.exceptions.ResponseError):
                client.bgrewriteaof()
            wait_until(lambda: scraped(apart)[shortcomings] == 1)
            (logged,) = worker.logged("redis_unsuitable")
            assert logged["detail"].startswith("it failed to rewrite its append-only file")
            assert health(apart.metrics.port, "--ready") == (0, [])
        code, findings = diagnosed(apart)
        assert (code, [row["detail"] for row in findings["redis"]]) == (1, [logged["detail"]])
        with suppress(redis.exceptions.ResponseError):
            client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        # Redis disconnects its clients when it becomes a replica.
        with suppress(redis.exceptions.ConnectionError):
            client.replicaof("127.0.0.1", str(free_port()))
        with Store.open(apart) as store:
            named = wait_until(lambda: [each.partition(":")[0] for each in store.condition().others])
        problems = ["it is a replica and refuses writes", "its last snapshot failed, and with save points it refuses writes"]
        assert named == [problems[0], logged["detail"].partition(":")[0], problems[1]]


def test_work_that_a_worker_may_not_do_is_measured_while_it_decides(settings: Settings, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.connect() as admin:
        apart = settings_at(server.url, metrics__port=free_port(), ledger__resend_after_s=2.0)
        admin.acl_setuser("administrator", enabled=True, nopass=True, keys=["*"], commands=["+@all"])
        age = 'kp_scorer_work_age_seconds{{work="{}"}}'.format
        with at_work(apart, tmp_path) as (worker, client):
            # Simulate a users.acl of an earlier version.
            admin.auth("any", "administrator")
            admin.execute_command("ACL", "SETUSER", "default", "-zrangebyscore")
            wait_until(lambda: scraped(apart)[age("submission_resender")] > 4)
            assert client.wait(client.submit(fresh_samples(1)[0]), timeout_s=PATIENCE_S)
            assert scraped(apart)[age("garbage_collector")] < scraped(apart)[age("submission_resender")]
            details = [line["detail"] for line in worker.logged("work_put_off") if line["work"] == "submission_resender"]
            assert {detail.partition(" a command")[0] for detail in details} == {"ledger: Redis refuses: NOPERM"}
            (row,) = wait_until(lambda: [row for row in diagnosed(apart)[1]["workers"] if row["state"] == "wrong"])
            assert "its submission_resender fails: ledger: Redis refuses: NOPERM" in row["detail"]


def test_a_worker_that_may_not_receive_is_not_ready_until_it_may(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.connect() as admin:
        apart = settings_at(server.url, metrics__port=free_port())
        admin.acl_setuser("administrator", enabled=True, nopass=True, keys=["*"], commands=["+@all"])
        admin.auth("any", "administrator")
        with at_work(apart, tmp_path) as (_, client):
            admin.execute_command("ACL", "SETUSER", "default", "-lrange")
            trace_id = client.submit(fresh_samples(1)[0])
            refusal = "broker: the broker refuses: NOPERM"
            wait_until(lambda: [each for each in health(apart.metrics.port, "--ready")[1] if each.startswith(refusal)])
            # The worker connects again every second, and is not ready in between either.
            until_s = time.monotonic() + 3
            while time.monotonic() < until_s:
                assert scraped(apart)["kp_scorer_ready"] == 0
            admin.execute_command("ACL", "SETUSER", "default", "+lrange")
            assert client.wait(trace_id, timeout_s=PATIENCE_S)
            wait_until(lambda: health(apart.metrics.port, "--ready")[0] == 0)


def test_doctor_names_workers_whose_settings_differ(settings: Settings, tmp_path: Path) -> None:
    lenient = with_changed(settings, scoring__threshold=0.2, metrics__port=free_port())
    with at_work(settings, tmp_path), at_work(lenient, tmp_path), Store.open(settings) as store:
        wait_until(lambda: len(store.worker_reports()) == 2)
        code, findings = diagnosed(settings)
        assert code == 1
        (row,) = findings["workers"]
        assert row["detail"].startswith("workers have different settings, ")
        assert {each.alike() for each in (settings, lenient)} <= set(re.findall(r"\w+", row["detail"]))


@pytest.mark.slow
def test_clients_workers_and_doctor_report_an_alarm_of_rabbitmq(settings: Settings, tmp_path: Path) -> None:
    port = free_port()
    first, second, third = fresh_samples(3)
    with OwnNode(tmp_path) as node:
        on_node = with_changed(settings, broker__url=node.url, metrics__port=port)
        with at_work(on_node, tmp_path, variables=LOOKS_OFTEN) as (worker, client):
            client.wait(client.submit(first), timeout_s=30)
            node.limit_memory(0.0)
            refused = pytest.raises(BrokerBlocked, match="RabbitMQ accepts no messages, as it is short of memory or disk")
            with refused:
                client.submit(second)
            connections = node.connections()
            for _ in range(8):
                with refused, ending_within(0.5):
                    client.submit(second)
            assert node.connections() < connections + 4, "each refusal leaves one"
            (reason,) = wait_until(lambda: health(port, "--ready")[1])
            assert reason.startswith("broker: RabbitMQ accepts no messages")
            assert [line["detail"] for line in worker.logged("broker_blocked")] == [reason]
            assert scraped(on_node)["kp_scorer_broker_blocked"] == 1
            code, findings = diagnosed(on_node)
            assert (code, [row["detail"] for row in findings["broker"]]) == (1, [reason])
            node.limit_memory(0.4)
            client.wait(client.submit(third), timeout_s=60)
            client.wait(client.submit(second), timeout_s=60)
            wait_until(lambda: health(port, "--ready")[0] == 0)


@contextmanager
def filling(client: redis.Redis, queue: str) -> Iterator[None]:
    """Put a message on a queue, and then a hundred a second until the block ends."""
    client.lpush(queue, "{}")
    stopping = threading.Event()

    def fill() -> None:
        while not stopping.wait(0.01):
            client.lpush(queue, "{}")

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def test_doctor_shows_when_a_queue_of_decisions_will_be_full(settings: Settings, redis_client: redis.Redis) -> None:
    limited = with_changed(settings, queues__results_limit=5_000)
    with filling(redis_client, "decisions.accepted"):
        _, findings = diagnosed(limited)
    (advice,) = [row["detail"] for row in findings["queues"] if row["detail"].startswith("decisions.accepted")]
    assert re.search(r"unread decisions of 5000, full in \d+ (s|min): read them", advice)
    # A queue that does not grow never fills up.
    assert not any("full in" in row["detail"] for row in diagnosed(limited)[1]["queues"])


def diagnosed(settings: Settings, *options: str, **variables: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Run `doctor`; return its exit code, and its findings by the name of the check."""
    environment = as_environment(settings) | variables
    done = invoked(commands, "doctor", "--set", "embedding.embedder=none", *options, env=environment)
    findings: dict[str, list[dict[str, Any]]] = {}
    for row in rows_in(done.stdout):
        findings.setdefault(row["check"], []).append(row)
    return done.exit_code, findings


def test_problems_are_reported_with_the_remedy(settings: Settings, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.connect() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
        client.config_set("maxmemory", 10**9)
        client.lpush("decisions.accepted", *["{}"] * 9)
        client.lpush("decisions.rejected", *["{}"] * 10)
        elsewhere = with_changed(settings, redis__url=server.url, broker__url=server.url)
        code, findings = diagnosed(
            elsewhere, "--set", "queues.results_limit=10", "--set", "ledger.resend_after_s=30", CELERY_BROKER_URL="redis://x"
        )
        assert code == 1
        wrong = {check: [row["detail"] for row in rows if row["state"] == "wrong"] for check, rows in findings.items()}
        assert [detail.partition(": set ")[2] for detail in wrong["redis"]] == ["maxmemory-policy noeviction", "appendonly yes"]
        assert "9 unread decisions of 10" in wrong["queues"][0]
        (advice,) = [row["detail"] for row in findings["queues"] if row["state"] == "advice"]
        assert advice.startswith("decisions.rejected has 10 unread decisions of 10")
        assert "ledger.resend_after_s" in wrong["settings"][0]
        assert "CELERY_BROKER_URL" in findings["variables"][0]["detail"]
        assert [row["state"] for row in findings["workers"] + findings["embedder"]] == ["advice", "advice"]
        server.kill()
        code, findings = diagnosed(elsewhere)
        assert code == 1
        assert findings["redis"][0]["state"] == findings["queues"][0]["state"] == "wrong"
        server.start()


def test_a_cluster_is_wrong_and_shortcomings_of_a_managed_redis_are_left_to_its_provider(
    settings: Settings, tmp_path: Path
) -> None:
    # A server of a cluster also listens on a port 10,000 higher, which must not belong to a connection of another test.
    server = next(server for server in iter(lambda: RedisServer(tmp_path), None) if server.port + 10_000 in LISTENING)
    with server:
        elsewhere = with_changed(settings, redis__url=server.url, broker__url=server.url)
        server.kill()
        server.start("cluster-enabled yes")
        (code, findings) = diagnosed(elsewhere)
        assert code == 1
        details = [row["detail"] for row in findings["redis"] if row["state"] == "wrong"]
        assert details[0].startswith("it is a Redis Cluster")
        assert details[-1].endswith("set maxmemory")
        assert "the broker refuses: it is a Redis Cluster" in findings["queues"][0]["detail"]
        server.kill()
        server.start('rename-command CONFIG ""', "appendonly no")
        assert diagnosed(elsewhere)[1]["redis"] == [{"check": "redis", "state": "ok", "detail": "in order"}]
        server.kill()
        server.start('rename-command CONFIG ""', "appendonly no", "maxmemory-policy volatile-lru")
        code, findings = diagnosed(elsewhere)
        assert (code, [row["state"] for row in findings["redis"]]) == (1, ["wrong"])
        assert "set maxmemory-policy noeviction" in findings["redis"][0]["detail"]


@pytest.mark.parametrize(
    ("options", "priority", "name", "state"),
    [
        ({"priority_steps": list(range(10)), "sep": ":"}, 4, "traces:4", "wrong"),
        ({"priority_steps": list(range(10))}, 4, "traces\x06\x164", "wrong"),
        ({"global_keyprefix": "app:"}, 0, "app:traces", "advice"),
        ({"global_keyprefix": "my_prefix_"}, 0, "my_prefix_traces", "advice"),
        ({"global_keyprefix": "app/"}, 9, "app/traces\x06\x169", "advice"),
    ],
)
def test_lists_where_celery_puts_calls_beside_the_queue_are_named(
    options: dict[str, Any], priority: int, name: str, state: str, settings: Settings
) -> None:
    with Celery("producer", broker=settings.broker.url) as producer:
        producer.conf.broker_transport_options = options
        producer.send_task("score_trace", args=[{}], queue="traces", priority=priority, ignore_result=True)
    with redis.Redis.from_url(settings.broker.url) as client:
        client.lpush("archived_traces", "a list of another program")
    finding = diagnosed(with_changed(settings, queues__traces="traces"))[1]["queues"][0]
    assert finding["state"] == state
    assert finding["detail"].startswith(f"{name!r} has messages that none of these workers receives")


def test_a_networked_server_is_wrong_without_password_and_noted_without_encryption(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.connect() as client:
        # This is the same address in another form, which doctor takes for another machine's.
        url = server.url.replace("127.0.0.1", "127.1")
        code, findings = diagnosed(settings_at(url))
        assert (code, [row["state"] for row in findings["redis"][:2]]) == (1, ["wrong", "advice"])
        assert findings["redis"][0]["detail"].startswith("127.1 lets in anyone who reaches it")
        assert "use TLS" in findings["redis"][1]["detail"]
        client.config_set("requirepass", "secret")
        closed = url.replace("127.1", ":secret@127.1")
        code, findings = diagnosed(settings_at(closed))
        assert "lets in" not in findings["redis"][0]["detail"]
        assert "use TLS" in findings["redis"][0]["detail"]


def test_healthy_deployment_exits_0(settings: Settings, limit_memory: Callable[[int], object]) -> None:
    limit_memory(10**9)
    code, findings = diagnosed(settings, "--set", "embedding.embedder=openvino")
    assert code == 0
    assert {row["state"] for rows in findings.values() for row in rows} <= {"ok", "advice"}
    (embedder,) = findings["embedder"]
    assert embedder["state"] == "ok"


def test_a_namespace_with_most_of_the_window_is_named(settings: Settings, limit_memory: Callable[[int], object]) -> None:
    limit_memory(10**9)
    with Store.open(settings) as store:
        log = store.novelty_log("space")
        for number in range(99):
            namespace = ("team-a:", "", "team-b:")[min(number % 6, 2)]
            log.append([Candidate(f"kp:trace:{namespace}{number}", bytes(16), np.zeros(384, dtype=np.float32))], None)
        # With fewer than a hundred entries, a producer that has most of them is not named.
        assert {row["state"] for row in diagnosed(settings)[1]["window"]} == {"ok"}
        log.append([Candidate("kp:trace:team-b:99", bytes(16), np.zeros(384, dtype=np.float32))], None)
    code, findings = diagnosed(settings)
    (window,) = findings["window"]
    assert (code, window["state"]) == (0, "advice")
    assert "the namespace team-b: 66% of the newest entries" in window["detail"]


def test_missing_and_different_queues_are_reported_and_none_is_declared(rabbitmq: RabbitMQ) -> None:
    settings = rabbitmq.settings()
    for _ in range(2):
        _, findings = diagnosed(settings)
        assert {row["state"] for row in findings["queues"]} == {"advice"}
        assert len(findings["queues"]) == 6
    with make_celery(settings) as app:
        declare_queues(app, first_queues(settings).in_order)
        declare_queues(app, [results_queue(rabbitmq.settings(queues__results_limit=7), "accepted")])
    code, findings = diagnosed(settings)
    assert code == 1
    (detail,) = [row["detail"] for row in findings["queues"] if row["state"] == "wrong"]
    assert "x-max-length" in detail


INCIDENTS: Final = "deploy/INCIDENTS.md"
RULE_FILES: Final = ("alerts.yml", "slo.yml")
LAST: Final = datetime(2026, 6, 30, tzinfo=UTC)
WEEK: Final = timedelta(days=7)
METRIC: Final = re.compile(r"\b(?:kp_scorer|process)_\w+")
SELECTED: Final = 'job=~"$job",namespace=~"$namespace"'
"""The selector of every metric in the dashboard; it selects the fleets that the dashboard's variables name."""


@pytest.fixture(scope="module")
def exposed() -> Samples:
    metrics = Metrics((), ["secrets"], ["traces"])
    unread = UnreadDecisions({"decisions.accepted": 0}, {}, limit=100, most_bytes=0, full=(), rings=(), at_s=0.0)
    servers, dead_lettered, counts = {"redis": Condition(0.0, 0)}, dict.fromkeys(REASONS, 0), SubmissionCounts(0, 0, 0, 0)
    metrics.set_backlog(
        Backlog({"traces": 0}, {"traces": 0.1}, unread, counts, 0.0, dead_lettered, servers, "", {"redis": {"records": 0}})
    )
    metrics.count_decisions_dropped("decisions.rejected", 0)
    metrics.work_age_s.labels("submission_resender")
    return samples_of(generate_latest(metrics.registry).decode())


@pytest.fixture(scope="module")
def metric_names(exposed: Samples) -> set[str]:
    return {name.partition("{")[0] for name in exposed}


def rules() -> list[dict[str, Any]]:
    files = (yaml.safe_load((RULES / name).read_text("utf-8")) for name in RULE_FILES)
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def promtool(*arguments: str) -> str:
    """Run promtool, which must succeed, in the folder of the rules; return its output."""
    done = subprocess.run([program("promtool"), *arguments], cwd=RULES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def queries(*titles: str) -> list[str]:
    """Return the queries of the panels with these titles; without any, of all panels."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return [target["expr"] for panel in panels if not titles or panel["title"] in titles for target in panel["targets"]]


def asked_of_all_fleets(query: str) -> str:
    """Return a query of the dashboard as Grafana sends it if all fleets are chosen."""
    return query.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$namespace", ".*")


def test_the_dashboard_names_only_existing_metrics(metric_names: set[str]) -> None:
    asked = queries()
    named = set(METRIC.findall(" ".join(asked)))
    assert named - metric_names == set()
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    assert {name for name in recorded if ":drift:" in name} <= {query.partition("{")[0] for query in asked}
    named |= set(METRIC.findall(" ".join(recorded.values())))
    # Every metric must appear somewhere: one that nobody looks at need not be exposed.
    assert {name for name in metric_names if name.startswith("kp_scorer_") and _is_unseen(name, named)} == set()


def test_the_dashboard_asks_for_buckets_that_exist(exposed: Samples) -> None:
    buckets = re.findall(r"kp_scorer_\w+_bucket\{le=[^}]+\}", " ".join(queries()).replace(f"{SELECTED},", ""))
    assert set(buckets) == {f'kp_scorer_processing_seconds_bucket{{le="{limit}"}}' for limit in ("0.1", "1.0")} & exposed.keys()


def test_the_dashboard_selects_fleets_by_job_and_namespace_in_every_query() -> None:
    behind = [query[named.end() :] for query in queries() for named in re.finditer(r"\b(?:kp_scorer|process)[_:][\w:]+", query)]
    assert behind
    assert [each for each in behind if not each.startswith(f"{{{SELECTED}")] == []
    variables = json.loads(DASHBOARD.read_text("utf-8"))["templating"]["list"]
    # "All" also selects series without a namespace, such as Compose's.
    assert [each["name"] for each in variables if each.get("allValue") == ".*"] == ["namespace", "job"]


def test_no_panel_of_what_workers_share_hides_one_fleet_behind_another(tmp_path: Path) -> None:
    """Two fleets have queues of the same name, and two workers of the first report them."""
    fleets = {'job="a",namespace="x"': (3, 2), 'job="a",namespace="y"': (70,)}
    named = {"kp_scorer_pending": "", "kp_scorer_redis_memory_used_ratio": 'server="redis"'}
    named |= {f"kp_scorer_{name}": 'queue="one"' for name in ("queue_messages", "results_used_ratio")}
    series = [
        {"series": f'{name}{{{fleet},instance="{number}",{labels}}}', "values": f"{value}"}
        for name, labels in named.items()
        for fleet, values in fleets.items()
        for number, value in enumerate(values)
    ]
    expected = [
        {
            "expr": asked_of_all_fleets(query),
            "eval_time": "0m",
            "exp_samples": [
                {"labels": f"{{{fleet},{labels}}}", "value": max(values)}
                for name, labels in named.items()
                if name in query
                for fleet, values in fleets.items()
            ],
        }
        for query in queries("Pending", "What waits", "How full")
    ]
    (tmp_path / "fleets.yml").write_text(
        json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expected}]}), "utf-8"
    )
    promtool("test", "rules", str(tmp_path / "fleets.yml"))


def _is_unseen(name: str, named: set[str]) -> bool:
    """Return whether a metric, or the histogram that a sample belongs to, is named nowhere."""
    base_name = re.sub(r"_(bucket|sum|count)$", "", name)
    return not any(each.startswith(base_name) for each in named) and not name.endswith("_age_seconds")


def test_the_rules_name_only_existing_metrics(metric_names: set[str]) -> None:
    text = "".join((RULES / name).read_text("utf-8") for name in RULE_FILES)
    of_serve = samples_of(generate_latest(ServeMetrics().registry).decode())
    series = {"kp_scorer_serve_requests_total"}  # This series begins with the first request.
    assert set(METRIC.findall(text)) - metric_names - {name.partition("{")[0] for name in of_serve} - series == set()
    tested = "".join(file.read_text("utf-8") for file in RULES.glob("*_test.yml"))
    assert set(re.findall(r"alert: (\w+)", text)) == set(re.findall(r"alertname: (\w+)", tested))


def test_every_alert_names_the_part_of_the_document_that_names_it() -> None:
    runbooks = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules() if "alert" in rule}
    page = "https://runbooks.example/INCIDENTS.md"
    assert {runbook.partition("#")[0] for runbook in runbooks.values()} == {page}
    assert {runbook.partition("#")[2] for runbook in runbooks.values()} - anchors_of(INCIDENTS) == set()
    rows = [line.text for line in lines_of(INCIDENTS) if line.text.startswith("| `KpScorer")]
    named = {row.split("`")[1]: f"{page}{re.findall(r'[(](#.*?)[)]', row)[0]}" for row in rows}
    assert named == runbooks
    inhibiting = yaml.safe_load(code_with("inhibit_rules:"))["inhibit_rules"]
    assert set(re.findall(r"KpScorer\w+", json.dumps(inhibiting))) - named.keys() == set()


def test_promtool_accepts_configuration_rules_and_queries_and_alert_tests_pass(tmp_path: Path) -> None:
    assert "1 rule files found" in promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "alerts_test.yml", "drift_test.yml", "slo_test.yml")
    rules = [{"record": f"query:{number}", "expr": asked_of_all_fleets(query)} for number, query in enumerate(queries())]
    # Prometheus' files are YAML, and any JSON is YAML.
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}), "utf-8")
    promtool("check", "rules", *RULE_FILES, str(file))


def test_the_rules_compute_of_the_metrics_what_a_report_computes_of_the_decisions(tmp_path: Path) -> None:
    decided = decisions_of_two_weeks()
    expected = drift([each for each in decided if each.domain == "code"], LAST)
    # The series have a value every half hour for two weeks. In each week the counters grow in 128 steps, which floats add up
    # exactly, and stay constant at the week's ends.
    weeks = [exposed_by([each for each in decided if (time_of(each) > LAST - WEEK) == is_last]) for is_last in (False, True)]
    grown = {name: [samples[name] for samples in weeks] for name in weeks[0] if 'domain="code"' in name and "bin=" in name}
    # Another fleet has the same weeks in reverse. Its index is the same, but that of both fleets together would be 0.
    fleets = {'job="kp-scorer",namespace="one"': 1, 'job="kp-scorer",namespace="other"': -1}
    file = {
        "rule_files": [str(RULES / "alerts.yml")],
        "evaluation_interval": "1h",
        "tests": [
            {
                "interval": "30m",
                "input_series": [
                    _counter(name.replace("{", f"{{{fleet},"), *values[::order])
                    for fleet, order in fleets.items()
                    for name, values in grown.items()
                ],
                "promql_expr_test": [
                    each for fleet, order in fleets.items() for each in _tests_of(expected, fleet, ("before", "this")[::order])
                ],
            }
        ],
    }
    (tmp_path / "drift.yml").write_text(json.dumps(file), "utf-8")
    assert len(expected.indices) == 6
    promtool("test", "rules", str(tmp_path / "drift.yml"))


def _counter(name: str, first: float, second: float) -> dict[str, str]:
    """Return a Prometheus series that grows by the first amount in one week, and by the second in the next."""
    both = first + second
    growth = f"0x2 {first / 128}+{first / 128}x127 {first}x207 {first + second / 128}+{second / 128}x127 {both}x207"
    return {"series": name, "values": growth}


def _tests_of(expected: Drift, fleet: str, weeks: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield promtool's expectations for a fleet; ``weeks`` are the rules' labels for the first and the second expected week."""
    for name, index in expected.indices.items():
        yield _is_near("index", f'{fleet},domain="code",dimension="{name}"', index)
    for number, week in enumerate(weeks):
        labels = f'{fleet},domain="code",week="{week}"'
        yield _is_near("traces", labels, expected.traces[number])
        yield _is_near("accepted", labels, expected.accepted[number] / expected.traces[number])


def decisions_of_two_weeks() -> list[Decision]:
    """Return 400 decisions of one week and 700 of the next, which shift to other bins, and a copy of each in another domain."""
    random = np.random.default_rng(7)
    decided = []
    for number in range(1_100):
        is_last = number >= 400
        low, high = (0.4, 1.0) if is_last else (0.0, 0.7)
        values = np.round(random.uniform(low, high, 3), 2).tolist()
        dimensions = Dimensions(complexity=values[0], novelty=values[1], tool_diversity=0.5, outcome_confidence=0.3 * is_last)
        at = LAST - WEEK * random.uniform(0.1, 0.9) - WEEK * (not is_last)
        made = decision(str(number), score=values[2], dimensions=dimensions, domain="code", decided_at=at.isoformat())
        # A report names these domains, whereas a worker counts all domains without settings together.
        decided += [made, made.model_copy(update={"domain": f"{number % 9}"})]
    return decided


def exposed_by(decided: Sequence[Decision]) -> Samples:
    """Return the metrics of a worker that has made these decisions."""
    metrics = Metrics({"code"})
    for each in decided:
        metrics.count_decided(each)
    return samples_of(generate_latest(metrics.registry).decode())


def _is_near(name: str, selector: str, value: float) -> dict[str, Any]:
    expr = f"abs(kp_scorer:drift:{name}{{{selector}}} - {value}) < bool 1e-6"
    return {"expr": expr, "eval_time": "14d", "exp_samples": [{"labels": f"{{{selector}}}", "value": 1}]}


def test_prometheus_reads_two_workers(settings: Settings, tmp_path: Path) -> None:
    first, second = (with_changed(settings, metrics__port=free_port()) for _ in range(2))
    with (
        start_worker(first, tmp_path / "one.log", command=FAST_WORKER),
        start_worker(second, tmp_path / "two.log", command=FAST_WORKER),
        running_prometheus(tmp_path, [first.metrics.port, second.metrics.port]) as url,
    ):
        wait_until(lambda: values_of(url, "sum(kp_scorer_ready)") == ["2"])
        assert values_of(url, "count(kp_scorer_info{engine='python'})") == ["2"]
        assert values_of(url, "scrape_samples_scraped < 100") == []
