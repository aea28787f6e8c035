"""On the shipped Redis, each user may do what the documents show for its role, and nothing else."""

import hashlib
import importlib
import itertools
import json
import pkgutil
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from celery import Celery
from kombu import Queue
from kp_scorer import read_decisions, store
from kp_scorer.broker import redis_transport
from kp_scorer.broker.backlog import unread_decisions
from kp_scorer.broker.calls import declare_queues
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.queues import results_queues
from kp_scorer.broker.results import Publisher
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Submission
from kp_scorer.store.scripts import Script

from tests.support.builders import decision, load_embedder
from tests.support.changed_settings import with_changed
from tests.support.commands import command
from tests.support.http_server import open_server
from tests.support.outcomes import publish
from tests.support.paths import REPOSITORY
from tests.support.permissions import documented
from tests.support.processes import PATIENCE_S, at_work, wait_until
from tests.support.servers import default_server, redis_servers
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
        # Without cached scripts, loading them needs a permission, too.
        admin.script_flush()
    server.refused()


DECISIONS: Final = ["decisions.accepted", "decisions.rejected"]


@pytest.mark.slow
def test_nothing_that_the_documents_show_is_refused(server: Shipped, tmp_path: Path) -> None:
    # Servers differ in how they check permissions, and the ways of publishing need different ones, so each server gets one way.
    via = "queue" if server.process.args[0] == default_server() else "stream"  # type: ignore[index]
    published = {"results__via": via, "results__with_trace": True}
    users = ("client", "worker", "operator", "consumer")
    settings = {user: with_changed(server.settings(user), **published) for user in users}
    producer = Celery("producer", broker=server.url("producer"), set_as_current=False)
    asking = Celery("asking", broker=server.url("client"), backend=server.url("client"), set_as_current=False)
    first, second, third, fourth, rejected = fresh_samples(5)
    with Client(settings["client"]) as client:
        # A client can only run scripts that a worker has loaded.
        with pytest.raises(ServiceUnavailable, match="this user may not load them: start a worker of this version"):
            client.submit(first)
        assert server.refused() != []
        with server.connect("operator") as operator:
            for name in DECISIONS if via == "stream" else ():
                operator.xgroup_create(name, "readers", id="0", mkstream=True)
        with at_work(settings["worker"], tmp_path) as (worker, _):
            plain = Queue("traces", no_declare=True)
            producer.send_task("score_trace", args=[first], queue=plain, mandatory=True)
            asked = asking.send_task("score_trace", args=[second], queue=plain, ignore_result=False)
            assert asked.get(timeout=PATIENCE_S)["trace_id"] == second["id"]
            assert client.wait(client.submit(third), timeout_s=PATIENCE_S).trace_id == third["id"]
            producer.send_task("score_trace", args=[{"id": "kp:trace:invalid"}], queue=plain)
            wait_until(lambda: worker.events("trace_dead"))
            _operate(settings, tmp_path, str(third["id"]), rejected)
            _read_all(server, settings["consumer"], {trace["id"] for trace in (first, second, third, rejected)})
            assert server.refused() == []
            with server.connect("administrator") as admin:
                admin.script_flush()

            def submits_again() -> str:
                try:
                    return client.submit(fourth)
                except ServiceUnavailable:
                    return ""

            client.wait(wait_until(submits_again), timeout_s=PATIENCE_S)
    for app in (producer, asking):
        app.close()
    assert worker.process.returncode == 0
    assert "NOPERM" not in worker.text()


def _operate(settings: Mapping[str, Settings], directory: Path, decided: str, trace: dict[str, Any]) -> None:
    """Run those of an operator's commands that the operators' pages do not show, or for which the pages load an embedder."""
    file = directory / "trace.json"
    file.write_text(json.dumps(trace), "utf-8")
    beginning = decided.removeprefix("kp:trace:")[:12]

    def run(*arguments: str) -> None:
        done = command(with_changed(settings["operator"], embedding__embedder="words"), *arguments)
        assert done.exit_code == 0, f"{arguments}: {done.output}"

    run("submit", str(file), "--wait")
    for asked in (["stats"], ["status", decided], ["explain", beginning], ["label", decided, "good"]):
        run(*asked)
    run("cache", "warm", str(file))
    run("cache", "pin", "tasks", str(file))
    with Store.open(settings["worker"]) as store:
        sets = store.pinned_sets(load_embedder(embedder="words").space)
        pinned = sets.read("tasks")
        assert pinned
        assert sets.versions(["tasks"]) == [pinned.version]
    run("cache", "unpin", "tasks")
    for name in ("export", "forget"):
        # These commands search everything, although they find nothing.
        assert command(settings["operator"], name, "--agent", "nobody").exit_code == 1


def _read_all(server: Shipped, settings: Settings, trace_ids: set[str]) -> None:
    """Read the decisions on these traces, from the streams as a group or else from the queues."""
    read = set[str]()
    with server.connect("reader") as reader:

        def are_all_read() -> bool:
            if settings.results.via == "stream":
                decisions = read_decisions(group="readers", follow=False, settings=settings)
                read.update(decision.trace_id for decision in decisions)
            elif (item := reader.brpop(DECISIONS, timeout=0.1)) is not None:
                read.add(json.loads(item[1])["properties"]["message_id"])
            return read == trace_ids

        wait_until(are_all_read)


def test_clients_look_up_whole_ids_alone(server: Shipped) -> None:
    settings = server.settings("client")
    _load_scripts(server)
    with Client(settings) as client:
        (trace,) = fresh_samples(1)
        client.submit(trace)
    done = command(settings, "status", str(trace["id"]), str(trace["id"]).removeprefix("kp:trace:")[:-1])
    assert [json.loads(line)["state"] for line in done.stdout.splitlines()] == ["pending", "unknown"]
    assert "may not search for beginnings of ids (SCAN); give the exact id" in done.stderr


VERBS: Final[dict[str, Sequence[str]]] = {
    "put a message on the queue of traces": ["LPUSH traces message"],
    "count the messages there": ["LLEN traces"],
    "read or remove them": ["LRANGE traces 0 -1", "RPOP traces", "DEL traces"],
    "reach what is in flight": ["LPUSH traces.moving message", "HGETALL traces.unacknowledged"],
    "read a record by its id": ["HGET kp:trace:1 state"],
    "write a record, also another's": ["HSET kp:trace:1 decision forged"],
    "read many records, list ids": ["HGETALL kp:trace:1", "ZRANGE kp:pending 0 -1"],
    "read or write the novelty log": ["XRANGE kp:log:space - +", "XADD kp:log:space * i 1"],
    "read dead letters": ["HGETALL kp:dead:1"],
    "read decisions": ["RPOP decisions.accepted", "XRANGE decisions.accepted - +"],
    "read them in a group": ["XREADGROUP GROUP group me STREAMS decisions.accepted >"],
    "create a stream or a group": ["XGROUP CREATE decisions.accepted group $ MKSTREAM"],
    "write or drop decisions": [
        "LPUSH decisions.accepted message",
        "XADD decisions.accepted * decision 1",
        "DEL decisions.accepted",
    ],
    "read results of Celery": ["GET celery-task-meta-1"],
    "write them": ["SET celery-task-meta-1 result"],
    "run scripts that workers have loaded": [f"EVALSHA {hashlib.sha1(b'none').hexdigest()} 0"],
    "load scripts of its own": ["SCRIPT LOAD return(1)", "EVAL return(1) 0"],
    "list all keys": ["SCAN 0"],
    "measure a key": ["MEMORY USAGE traces"],
    "reach another key or queue, also by a script": [
        "GET neighbour",
        "SET neighbour 1",
        "LPUSH celery message",
        "LPUSH traces2 message",
        "{redis.call('GET',KEYS[1])} 1 neighbour",
        "{redis.call('GET','neighbour')} 0",
        "PUBLISH neighbour message",
    ],
    "use Celery's bindings, mailboxes and events": [
        "SMEMBERS _kombu.binding.traces",
        "SADD _kombu.binding.traces traces\x06\x16\x06\x16decisions.accepted",
        "PUBLISH /0.celery.pidbox message",
        "LPUSH celeryev.1 message",
        "PUBLISH /0.celeryev/worker.heartbeat message",
    ],
    "reach another database": ["SELECT 1", "MOVE traces 1", "SWAPDB 0 1"],
    "configure, empty or end Redis, see its users": [
        *("CONFIG SET maxmemory 1", "CONFIG GET requirepass", "KEYS *", "FLUSHDB", "ACL LIST", "CLIENT LIST"),
        *("CLIENT KILL 127.0.0.1:1", "SCRIPT FLUSH", "SHUTDOWN NOSAVE"),
    ],
}
"""The Redis commands that each verb of the page stands for. Scripts, in braces, are loaded and run."""


@pytest.mark.parametrize("user", documented("Redis"))
def test_each_user_may_do_what_the_security_page_says_and_nothing_else(server: Shipped, user: str) -> None:
    with server.connect(user) as client:
        allowed = [verb for verb, acts in VERBS.items() if not all(_is_refused(client, act) for act in acts)]
    assert allowed == documented("Redis")[user]


def _scripts() -> Iterator[Script[..., Any]]:
    for package in (store, redis_transport):
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


def _load_scripts(server: Shipped) -> None:
    """Load the scripts, as a worker does before it takes work."""
    with Store.open(server.settings("worker")) as store:
        store.ledger.load_scripts()


def test_a_worker_may_call_tasks_by_the_queue_of_another_app(server: Shipped) -> None:
    called = {"results__via": "task", "results__task": "shop.decided"}
    settings = with_changed(server.settings("worker"), **called)
    with make_celery(settings) as app, Store.open(settings) as store:
        declare_queues(app, list(results_queues(settings, settings.kinds).values()))
        publish(Publisher(app, settings, store), decision("kp:trace:called"))
        assert sum(unread_decisions(app, settings, store, ()).counts.values()) == 1
    assert server.refused() == []


def _is_refused(client: redis.Redis, act: str) -> bool:
    command, *arguments = act.split()
    try:
        if command.startswith("{"):
            command, arguments = "EVALSHA", [str(client.script_load(f"return {command[1:-1]}")), *arguments]
        client.execute_command(command, *arguments)  # type: ignore[no-untyped-call]
    except redis.exceptions.ResponseError as error:
        # Within a script, Redis words the refusal differently, and Redis 7.0 differently from 6.2.
        refused = ("The user executing the script", "ACL failure in script", "permissions to access")
        return isinstance(error, redis.exceptions.NoPermissionError) or any(words in str(error) for words in refused)
    return False


COUNT: Final = "return redis.call('llen', KEYS[1]) + (redis.call('type', KEYS[1]).ok == 'list' and 0 or 1000)"
"""KEDA's script, which checks the type of a key before it counts."""


def test_a_team_writes_to_its_queue_alone_and_workers_take_from_all(server: Shipped, tmp_path: Path) -> None:
    page = (REPOSITORY / "deploy" / "OPERATIONS.md").read_text("utf-8")
    (rules,) = re.findall(r"^ +user producer-search on PASSWORD-OF-producer-search (.+)$", page, re.MULTILINE)
    queues = {"traces.search": {}, "traces.support": {"weight": 3}}
    trace, forbidden = fresh_samples(2)
    with (
        server.connect("administrator") as admin,
        at_work(with_changed(server.settings("worker"), queues__traces=queues), tmp_path) as (worker, _),
    ):
        admin.execute_command("ACL", "SETUSER", "search", "on", ">secret", *rules.split())
        with redis.Redis.from_url(f"redis://search:secret@127.0.0.1:{server.port}/0") as search:
            search.lpush("traces.search", json.dumps(trace))
            wait_until(lambda: worker.events("trace_decided"))
            for key in ("traces.support", "traces", "traces.search.unacknowledged", "decisions.accepted"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    search.lpush(key, json.dumps(forbidden))
            for act in ("LLEN traces.search", "RPOP traces.search", "DEL traces.search"):
                assert _is_refused(search, act)
        admin.acl_deluser("search")
    assert "NOPERM" not in worker.text()


@pytest.mark.parametrize("queue", ["traces", "traces.search"])
def test_producers_to_a_queue_with_a_limit_may_count_its_messages(server: Shipped, tmp_path: Path, queue: str) -> None:
    queues = {queue: {"limit": 10}}
    _load_scripts(server)
    of_client, of_serve = fresh_samples(2)
    # The page gives these permissions to the users for each queue with another name.
    added = () if queue == "traces" else (f"~{queue}", f"~{queue}??[369]")
    with server.connect("administrator") as admin:
        for user in ("client", "serve"):
            admin.execute_command("ACL", "SETUSER", user, *added)
    with Client(with_changed(server.settings("client"), queues__traces=queues)) as client:
        client.submit(of_client)
    with open_server(with_changed(server.settings("serve"), queues__traces=queues), tmp_path / "server.log") as http:
        assert http.ask("POST", "/traces", of_serve).status == 202
    assert server.refused() == []


def test_the_scaler_counts_waiting_messages_and_cannot_read_them(server: Shipped) -> None:
    (rules,) = re.findall(r"^ +user scaler on >PASSWORD (.+)$", (REPOSITORY / "deploy" / "README.md").read_text(), re.MULTILINE)
    with server.connect("administrator") as admin:
        admin.execute_command("ACL", "SETUSER", "scaler", "on", ">secret", *rules.split())
        admin.lpush("traces", "one", "two")
        with redis.Redis.from_url(f"redis://scaler:secret@127.0.0.1:{server.port}/0") as scaler:
            assert scaler.eval(COUNT, 1, "traces") == 2
            for forbidden in ("return redis.call('lindex', KEYS[1], 0)", "return redis.call('rpop', KEYS[1])"):
                with pytest.raises(redis.ResponseError):
                    scaler.eval(forbidden, 1, "traces")
            with pytest.raises(redis.exceptions.NoPermissionError):
                scaler.llen("decisions.accepted")
        assert admin.llen("traces") == 2
        admin.acl_deluser("scaler")


def test_strangers_are_refused_from_everywhere_in_the_words_of_redis(server: Shipped) -> None:
    address = socket.gethostbyname(socket.gethostname())
    with redis.Redis.from_url(server.url("worker", address)) as client:
        assert client.ping()
    for url, words in (
        (f"redis://{address}:{server.port}/0", "NOAUTH "),
        (f"redis://worker:wrong-password@{address}:{server.port}/0", "invalid username-password pair"),
    ):
        with (
            Store.open(load_settings({"redis.url": url})) as store,
            pytest.raises(ServiceUnavailable, match=rf"^redis\.url: Redis refuses: .*{words}") as refused,
        ):
            store.ping()
        assert "wrong-password" not in str(refused.value)


def test_a_refusal_quotes_redis_and_no_trace(server: Shipped) -> None:
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
    with server.connect("administrator") as admin, Store.open(server.settings("client")) as store:
        admin.delete(Keys("kp").pending)
        admin.execute_command("ACL", "SETUSER", "client", "-zadd")
        with pytest.raises(ServiceUnavailable, match=r"^ledger: Redis refuses: NOPERM a command in a script"):
            store.ledger.submit([submission])
        admin.execute_command("ACL", "SETUSER", "client", "+zadd")


def test_what_scripts_have_written_is_there_after_a_restart(server: Shipped, tmp_path: Path) -> None:
    executable = str(server.process.args[0])  # type: ignore[index]
    before = Shipped(tmp_path, executable)
    with Store.open(before.settings("worker")) as store:
        store.ledger.submit([Submission("kp:trace:1", b"digest", b"marker")])
    before.stop()
    after = Shipped(tmp_path, executable)
    try:
        with Store.open(after.settings("worker")) as store:
            assert store.ledger.counts().submitted == 1
    finally:
        after.stop()


def test_without_passwords_it_does_not_start(tmp_path: Path) -> None:
    for name in ("redis.conf", "users.acl"):
        tmp_path.joinpath(name).write_text(resources.files("kp_scorer.reference").joinpath(name).read_text("utf-8"), "utf-8")
    command = [default_server(), "redis.conf", "--port", "7"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "ACL" in done.stdout


def test_every_command_of_a_script_is_a_workers() -> None:
    users = resources.files("kp_scorer.reference").joinpath("users.acl").read_text("utf-8")
    (rules,) = re.findall(r"^user worker (.*)", users, re.MULTILINE)
    scripts = resources.files("kp_scorer.store").joinpath("lua").iterdir()
    called = {name.lower() for script in scripts for name in re.findall(r"redis\.call\('(\w+)'", script.read_text("utf-8"))}
    assert called
    assert {f"+{name}" for name in called} <= {rule.partition("|")[0] for rule in rules.split()}
