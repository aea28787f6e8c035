"""Redis as it is shipped, with its users: each may do what the documents show of its part, and nothing else."""

import hashlib
import importlib
import itertools
import json
import pkgutil
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from celery import Celery
from kombu import Queue
from kp_scorer import ledger, read_decisions
from kp_scorer.broker import redis_transport
from kp_scorer.broker.backlog import unread
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import declare_queues
from kp_scorer.broker.queues import results_queues
from kp_scorer.broker.results import Publisher
from kp_scorer.client import Client
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.ledger import Store
from kp_scorer.ledger.keys import Keys
from kp_scorer.ledger.records import Submission
from kp_scorer.ledger.scripts import Script
from kp_scorer.local import redis_executable
from kp_scorer.novelty import Candidate
from kp_scorer.novelty.audit import audit
from kp_scorer.novelty.pins import PinnedSet
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.loading import as_environment

from tests.support import commands
from tests.support.builders import decision_on
from tests.support.changed_settings import with_changed
from tests.support.fast_worker import WordHashEmbedder
from tests.support.permissions import documented
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.servers import redis_servers
from tests.support.shipped import Shipped
from tests.support.traces import fresh_samples


@pytest.fixture(scope="module", params=redis_servers())
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipped]:
    shipped = Shipped(tmp_path_factory.mktemp("shipped"), request.param)
    yield shipped
    shipped.stop()


@pytest.fixture(autouse=True)
def _emptied(server: Shipped) -> None:
    with server.connect("administrator") as admin:
        admin.flushall()
        # So that loading scripts needs permission too.
        admin.script_flush()
    server.refused()


@pytest.mark.slow
def test_nothing_that_the_documents_show_is_refused(server: Shipped, tmp_path: Path) -> None:
    settings = {user: server.settings(user) for user in ("client", "worker", "operator")}
    producer = Celery("producer", broker=server.url("producer"), set_as_current=False)
    asking = Celery("asking", broker=server.url("client"), backend=server.url("client"), set_as_current=False)
    first, second, third, fourth = fresh_samples(4)
    with (
        start_worker(settings["worker"], tmp_path / "worker.log", command=FAST_WORKER) as worker,
        Client(settings["client"]) as client,
    ):
        plain = Queue("traces", no_declare=True)
        producer.send_task("score_trace", args=[first], queue=plain, mandatory=True)
        asked = asking.send_task("score_trace", args=[second], queue=plain, ignore_result=False)
        assert asked.get(timeout=30)["trace_id"] == second["id"]
        assert client.wait(client.submit(third), timeout_s=30).trace_id == third["id"]
        producer.send_task("score_trace", args=[{"id": "kp:trace:invalid"}], queue=plain)
        wait_until(lambda: worker.events("trace_dead"), timeout_s=30)
        _operate(settings["operator"], tmp_path, str(third["id"]), fourth)
    for app in (producer, asking):
        app.close()
    assert server.refused() == []
    assert worker.process.returncode == 0
    assert "NOPERM" not in worker.text()


def _operate(settings: Settings, directory: Path, decided: str, trace: dict[str, Any]) -> None:
    """Run each command that the documents show to an operator."""
    file = directory / "trace.json"
    file.write_text(json.dumps(trace), "utf-8")

    run = partial(_done, settings)
    run("submit", str(file), "--wait")
    run("stats")
    run("top")
    # How much memory there is, only whoever runs it can know.
    assert run("doctor", "--set", "embedding.embedder=none", code=1).count("wrong") == 1
    run("status", decided)
    run("explain", decided.removeprefix("kp:trace:")[:12])
    run("label", decided, "good")
    assert json.loads(run("label")) == {"trace_id": decided, "good": True}
    letter = json.loads(run("dead-letter", "list").splitlines()[0])
    run("dead-letter", "show", letter["letter_id"])
    run("dead-letter", "drop", letter["letter_id"])
    run("audit")
    with Store.open(settings) as store:
        assert len(list(store.ledger.all_decided())) == 4
    run("cache", "info")
    assert len(run("decisions").splitlines()) == 4
    run("forget", decided)
    run("cache", "clear")


def test_clients_look_up_whole_ids_alone(server: Shipped) -> None:
    settings = server.settings("client")
    _load_scripts(server)
    with Client(settings) as client:
        (trace,) = fresh_samples(1)
        client.submit(trace)
    done = commands.run("status", str(trace["id"]), str(trace["id"]).removeprefix("kp:trace:")[:-1], **as_environment(settings))
    assert [json.loads(line)["state"] for line in done.stdout.splitlines()] == ["pending", "unknown"]
    assert "may not look for ids that begin so (SCAN); give the exact id" in done.stderr


Act = Callable[[redis.Redis], Any]


def _by_script(text: str, *keys: str) -> Act:
    return lambda client: client.evalsha(str(client.script_load(text)), len(keys), *keys)


VERBS: Final[dict[str, Sequence[Act]]] = {
    "put a message on the queue of traces": [lambda client: client.lpush("traces", "message")],
    "count the messages there": [lambda client: client.llen("traces")],
    "read or remove them": [
        lambda client: client.lrange("traces", 0, -1),
        lambda client: client.rpop("traces"),
        lambda client: client.delete("traces"),
    ],
    "reach what is in flight": [
        lambda client: client.lpush("traces.taking", "message"),
        lambda client: client.hgetall("traces.in_hand"),
    ],
    "read a record by its id": [lambda client: client.hget("kp:trace:1", "state")],
    "write a record, also another's": [lambda client: client.hset("kp:trace:1", "decision", "forged")],
    "read many records, list ids": [
        lambda client: client.hgetall("kp:trace:1"),
        lambda client: client.zrange("kp:pending", 0, -1),
    ],
    "read or write the novelty log": [
        lambda client: client.xrange("kp:log:space"),
        lambda client: client.xadd("kp:log:space", {"i": "1"}),
    ],
    "read dead letters": [lambda client: client.hgetall("kp:dead:1")],
    "read decisions": [lambda client: client.rpop("decisions.accepted"), lambda client: client.xrange("decisions.accepted")],
    "read them in a group": [lambda client: client.xreadgroup("group", "me", {"decisions.accepted": ">"})],
    "create a stream or a group": [lambda client: client.xgroup_create("decisions.accepted", "group", mkstream=True)],
    "write or drop decisions": [
        lambda client: client.lpush("decisions.accepted", "message"),
        lambda client: client.xadd("decisions.accepted", {"decision": "1"}),
        lambda client: client.delete("decisions.accepted"),
    ],
    "read results of Celery": [lambda client: client.get("celery-task-meta-1")],
    "write them": [lambda client: client.set("celery-task-meta-1", "result")],
    "run scripts that workers have loaded": [lambda client: client.evalsha(hashlib.sha1(b"none").hexdigest(), 0)],
    "load scripts of its own": [lambda client: client.script_load("return 1"), lambda client: client.eval("return 1", 0)],
    "list all keys": [lambda client: client.scan()],
    "measure a key": [lambda client: client.memory_usage("traces")],
    "reach another key or queue, also by a script": [
        lambda client: client.get("neighbour"),
        lambda client: client.set("neighbour", 1),
        lambda client: client.lpush("celery", "message"),
        lambda client: client.lpush("traces2", "message"),
        _by_script("return redis.call('GET', KEYS[1])", "neighbour"),
        _by_script("return redis.call('GET', 'neighbour')"),
        lambda client: client.publish("neighbour", "message"),
    ],
    "use Celery's bindings, mailboxes and events": [
        lambda client: client.smembers("_kombu.binding.traces"),
        lambda client: client.sadd("_kombu.binding.traces", "traces\x06\x16\x06\x16decisions.accepted"),
        lambda client: client.publish("/0.celery.pidbox", "message"),
        lambda client: client.lpush("celeryev.1", "message"),
        lambda client: client.publish("/0.celeryev/worker.heartbeat", "message"),
    ],
    "reach another database": [
        lambda client: client.select(1),
        lambda client: client.move("traces", 1),
        lambda client: client.swapdb(0, 1),
    ],
    "configure, empty or end Redis, see its users": [
        lambda client: client.config_set("maxmemory", 1),
        lambda client: client.config_get("requirepass"),
        lambda client: client.keys("*"),
        lambda client: client.flushdb(),
        lambda client: client.acl_list(),
        lambda client: client.client_list(),
        lambda client: client.client_kill("127.0.0.1:1"),
        lambda client: client.script_flush(),
        lambda client: client.shutdown(nosave=True),
    ],
}


@pytest.mark.parametrize("user", documented("Redis"))
def test_each_user_may_do_what_the_security_page_says_and_nothing_else(server: Shipped, user: str) -> None:
    with server.connect(user) as client:
        allowed = [verb for verb, acts in VERBS.items() if not all(_is_refused(client, act) for act in acts)]
    assert allowed == documented("Redis")[user]


def _scripts() -> Iterator[Script[..., Any]]:
    for package in (ledger, redis_transport):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            yield from (each for each in vars(importlib.import_module(module.name)).values() if isinstance(each, Script))


def test_no_script_of_ours_runs_for_long_whatever_a_client_calls_it_with(server: Shipped) -> None:
    endless = "while true do end"
    scripts = {each.sha for each in _scripts()}
    assert len(scripts) > 20
    with server.connect("worker") as worker, server.connect("client") as client:
        for script in _scripts():
            script.load(worker)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.script_load(endless)
        with pytest.raises(redis.exceptions.NoScriptError):
            client.evalsha(hashlib.sha1(endless.encode(), usedforsecurity=False).hexdigest(), 0)
        keys = ["traces", *(f"kp:trace:{number}" for number in range(11))]
        for sha, count in itertools.product(scripts, range(12)):
            with suppress(redis.ResponseError):
                client.evalsha(sha, count, *keys[:count], *["9" * 15] * 24)
    with server.connect("administrator") as admin:
        slow: Any = admin.slowlog_get(1_000)
    assert [entry["command"] for entry in slow if entry["duration"] > 100_000 and b"EVALSHA" in entry["command"]] == []


@pytest.mark.slow
def test_clients_run_the_scripts_that_workers_load_and_load_again(server: Shipped, tmp_path: Path) -> None:
    first, second, third = fresh_samples(3)
    with Client(server.settings("client")) as client, server.connect("administrator") as admin:
        with pytest.raises(ServiceUnavailable, match="this user may not load them: start a worker of this version"):
            client.submit(first)
        with start_worker(server.settings("worker"), tmp_path / "worker.log", command=FAST_WORKER):
            client.submit(second)
            admin.script_flush()

            def submits_again() -> str:
                try:
                    return client.submit(third)
                except ServiceUnavailable:
                    return ""

            client.wait(wait_until(submits_again, timeout_s=10), timeout_s=30)


def _load_scripts(server: Shipped) -> None:
    """As a worker does before it takes work."""
    with Store.open(server.settings("worker")) as store:
        store.ledger.load_scripts()


@pytest.mark.slow
def test_readers_may_read_queues_and_streams(server: Shipped, tmp_path: Path) -> None:
    streamed = {
        "results__accepted_via": "stream",
        "queues__results_limit": 1,
        "results__with_trace": True,
        "queues__rejected_waits": True,
    }
    settings = with_changed(server.settings("worker"), **streamed)
    traces = fresh_samples(8)
    with (
        start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker,
        Client(server.settings("client")) as client,
        server.connect("reader") as reader,
        server.connect("consumer") as consumer,
        server.connect("operator") as operator,
    ):
        operator.xgroup_create("decisions.accepted", "readers", id="0", mkstream=True)
        for trace in traces:
            client.submit(trace)
        read = set[str]()

        def all_read() -> bool:
            streams: Any = consumer.xreadgroup("readers", "me", {"decisions.accepted": ">"}, count=1)
            for _, entries in streams:
                for entry, fields in entries:
                    consumer.xack("decisions.accepted", "readers", entry)
                    read.add(fields[b"trace_id"].decode())
            if (item := reader.brpop(["decisions.rejected"], timeout=0.1)) is not None:
                read.add(json.loads(item[1])["properties"]["message_id"])
            return read == {trace["id"] for trace in traces}

        wait_until(all_read)
        _done(server.settings("operator"), "stats", "--set", "results.accepted_via=stream")
        readers = with_changed(server.settings("consumer"), **streamed)
        assert list(read_decisions("accepted", group="readers", follow=False, settings=readers)) == []
    assert server.refused() == []
    assert worker.process.returncode == 0


def test_a_worker_may_call_tasks_by_the_queue_of_another_app(server: Shipped) -> None:
    called = {"results__accepted_via": "task", "results__rejected_via": "task", "results__task": "shop.decided"}
    settings = with_changed(server.settings("worker"), **called)
    with make_celery(settings) as app, Store.open(settings) as store:
        declare_queues(app, list(results_queues(settings).values()))
        Publisher(app, settings, store).publish(Decision.model_validate_json(decision_on("kp:trace:called")))
        assert sum(unread(app, settings, store).values()) == 1
    assert server.refused() == []


def _done(settings: Settings, *arguments: str, code: int = 0) -> str:
    """Run a command of ours, which ends with this code; return what it prints."""
    done = commands.run(*arguments, stdin="y\n", **as_environment(settings))
    assert done.returncode == code, f"{arguments}: {done.stderr}"
    return done.stdout


def _is_refused(client: redis.Redis, act: Act) -> bool:
    try:
        act(client)
    except redis.exceptions.ResponseError as error:
        # In a script Redis says so in other words, and 7.0 in others than 6.2.
        refused = ("The user executing the script", "ACL failure in script", "permissions to access")
        return isinstance(error, redis.exceptions.NoPermissionError) or any(words in str(error) for words in refused)
    return False


def test_who_is_no_user_is_refused_from_everywhere_in_the_words_of_redis(server: Shipped) -> None:
    address = socket.gethostbyname(socket.gethostname())
    with redis.Redis.from_url(server.url("worker", address)) as client:
        assert client.ping()
    for url, words in (
        (f"redis://{address}:{server.port}/0", "HELLO must be called with the client already authenticated"),
        (f"redis://worker:wrong-password@{address}:{server.port}/0", "invalid username-password pair"),
    ):
        with (
            Store.open(load_settings({"redis.url": url})) as store,
            pytest.raises(ServiceUnavailable, match=rf"^redis\.url: Redis refuses: .*{words}") as refused,
        ):
            store.ping()
        assert "wrong-password" not in str(refused.value)


def test_a_refusal_has_the_words_of_redis_and_of_no_trace(server: Shipped) -> None:
    submission = Submission("kp:trace:1", b"digest", b"marker")
    with (
        Store.open(server.settings("producer")) as store,
        pytest.raises(ServiceUnavailable, match=r"^ledger: Redis refuses: .*NOPERM"),
    ):
        store.ledger.submit([submission])
    _load_scripts(server)
    with server.connect("administrator") as admin:
        admin.set(Keys("kp").pending, "no sorted set")
    with (
        Store.open(server.settings("client")) as store,
        pytest.raises(ServiceUnavailable, match=r"^ledger: Redis refuses: WRONGTYPE") as refused,
    ):
        store.ledger.submit([submission])
    assert "marker" not in str(refused.value)


def test_without_passwords_it_does_not_start(tmp_path: Path) -> None:
    for name in ("redis.conf", "users.acl"):
        tmp_path.joinpath(name).write_text(resources.files("kp_scorer.reference").joinpath(name).read_text("utf-8"), "utf-8")
    done = subprocess.run(
        [redis_executable(), "redis.conf", "--port", "7"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 1
    assert "ACL" in done.stdout


def test_the_store_is_used_whole_by_a_worker_and_an_operator(server: Shipped) -> None:
    with server.connect("worker") as worker, server.connect("operator") as operator:
        settings = Settings()
        _use_everything(Store(worker, settings), Store(operator, settings), settings)
    assert server.refused() == []


def test_every_command_of_a_script_is_a_workers() -> None:
    users = resources.files("kp_scorer.reference").joinpath("users.acl").read_text("utf-8")
    (rules,) = re.findall(r"^user worker (.*)", users, re.MULTILINE)
    for package in ("ledger", "broker/redis_transport"):
        scripts = resources.files("kp_scorer").joinpath(package, "lua").iterdir()
        called = {name.lower() for script in scripts for name in re.findall(r"redis\.call\('(\w+)'", script.read_text("utf-8"))}
        assert called
        assert {f"+{name}" for name in called} <= {rule.partition("|")[0] for rule in rules.split()}


def _use_everything(store: Store, operators: Store, settings: Settings) -> None:
    store.ping()
    ledger, letters, window = store.ledger, store.dead_letters, settings.novelty.window()
    embedder = WordHashEmbedder(settings.embedding, "trace")
    novelty = NoveltyMeter(embedder, store.novelty_log(embedder.space), window)
    decider = Decider(ledger, Policy(), novelty, settings.worker.max_attempts)
    decider.refresh()
    first, second, warmed = (decode_trace(payload, Limits()) for payload in fresh_samples(3))
    submission = Submission(first.id, first.digest(), b"{}")
    assert ledger.submit([submission]) == ["pending"]
    assert len(ledger.claim_lost(0, queue_is_empty=True)) <= 1
    ledger.count_resend(first.id)
    ledger.renew("{}")
    ledger.release([first.id])
    assert all(isinstance(decided, Decision) for decided in decider.decide([first, second]))
    assert ledger.submit([submission]) == ["decided"]
    letters.dead_letter(b'{"id": "kp:trace:bad"}', "invalid", "$: expected more", "kp:trace:bad")
    (log,) = operators.novelty_logs()
    warming = NoveltyMeter(embedder, log, window)
    ((_, vector, _),) = warming.embed([warmed])
    assert warming.place([Candidate(warmed.id, warmed.digest(), vector)]) != [None]
    assert log.info().entries == 3
    pinned = PinnedSet("traces", [warmed.id], vector[None])
    operators.pinned_sets(log.space).replace("tasks", pinned, check_room=lambda: operators.ledger.submit(()))
    sets = store.pinned_sets(log.space)
    assert (sets.versions(["tasks"]), len(sets.read("tasks") or ())) == ([pinned.version], len(pinned))
    assert [each["name"] for each in operators.all_pinned_sets()] == ["tasks"]
    operators.pinned_sets(log.space).remove("tasks")
    assert audit(list(log.entries()), operators.ledger.decided, window, lambda done, total: None).agreeing == 2
    assert (log.erase(first.id), operators.ledger.erase(first.id)) == ({first.id: 1}, [1])
    (dead_letter,) = operators.dead_letters.read()
    assert operators.dead_letters.payload(dead_letter.letter_id) == b'{"id": "kp:trace:bad"}'
    assert ledger.counts() == (3, 0, 2, 1)
    assert operators.dead_letters.drop(dead_letter)
    log.clear()
