"""Redis as it is shipped, with its users: each may do what the documents show of its part, and nothing else."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Queue
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import declare_queues
from kp_scorer.broker.queues import results_queues
from kp_scorer.broker.results import Publisher, unread
from kp_scorer.client import Client
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.novelty import Candidate
from kp_scorer.novelty.audit import audit
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings, as_environment, load_settings
from kp_scorer.store import Store, Submission, Tally, Verdict
from kp_scorer.store.keys import Keys
from kp_scorer.store.local_redis import redis_executable

from tests.support import commands
from tests.support.builders import decision_on
from tests.support.fast_worker import WordHashEmbedder
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.shipped import Shipped
from tests.support.traces import fresh_samples


@pytest.fixture(scope="module", params=["embedded", "redis-server on the PATH"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipped]:
    """The embedded Redis 6.2, and whatever newer server the machine has."""
    executable = redis_executable() if request.param == "embedded" else shutil.which("redis-server")
    if executable is None:
        pytest.skip("there is no redis-server on the PATH")
    shipped = Shipped(tmp_path_factory.mktemp("shipped"), executable)
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
    one, two, three, four = fresh_samples(4)
    with (
        start_worker(settings["worker"], tmp_path / "worker.log", command=FAST_WORKER) as worker,
        Client(settings["client"]) as client,
    ):
        plain = Queue("traces", no_declare=True)
        producer.send_task("score_trace", args=[one], queue=plain, mandatory=True)
        asked = asking.send_task("score_trace", args=[two], queue=plain, ignore_result=False)
        assert asked.get(timeout=30)["trace_id"] == two["id"]
        assert client.wait(client.submit(three), timeout_s=30).trace_id == three["id"]
        producer.send_task("score_trace", args=[{"id": "kp:trace:invalid"}], queue=plain)
        wait_until(lambda: worker.events("trace_dead"), timeout_s=30)
        _operate(settings["operator"], tmp_path, str(three["id"]), four)
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
    letter = json.loads(run("dead-letter", "list").splitlines()[0])
    run("dead-letter", "show", letter["letter_id"])
    run("dead-letter", "replay", letter["letter_id"], "--dry-run")
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
    with Client(settings) as client:
        (trace,) = fresh_samples(1)
        client.submit(trace)
    done = commands.run("status", str(trace["id"]), str(trace["id"])[:-1], **as_environment(settings))
    assert [json.loads(line)["state"] for line in done.stdout.splitlines()] == ["pending", "unknown"]
    assert "may not look for ids that begin so (SCAN): only a whole one will do" in done.stderr


Forbidden = Callable[[redis.Redis], Any]

TO_ALL: dict[str, Forbidden] = {
    "read a neighbour's key": lambda client: client.get("neighbour"),
    "write a neighbour's key": lambda client: client.set("neighbour", 1),
    "push onto a neighbour's queue": lambda client: client.lpush("celery", "message"),
    "push onto a queue of a like name": lambda client: client.lpush("traces2", "message"),
    "change the database": lambda client: client.select(1),
    "move to another database": lambda client: client.move("traces", 1),
    "list keys": lambda client: client.keys("*"),
    "empty the database": lambda client: client.flushdb(),
    "configure": lambda client: client.config_set("maxmemory", 1),
    "see the configuration": lambda client: client.config_get("requirepass"),
    "see users": lambda client: client.acl_list(),
    "see others": lambda client: client.client_list(),
    "end it": lambda client: client.shutdown(nosave=True),
    "reach a neighbour from a script": lambda client: client.eval("return redis.call('GET', KEYS[1])", 1, "neighbour"),
    "tell a neighbour": lambda client: client.publish("neighbour", "message"),
}
TO_PRODUCERS: dict[str, Forbidden] = {
    "read traces": lambda client: client.lrange("traces", 0, -1),
    "take traces": lambda client: client.rpop("traces"),
    "count traces": lambda client: client.llen("traces"),
    "remove traces": lambda client: client.delete("traces"),
    "touch what is in hand": lambda client: client.lpush("traces.taking", "message"),
    "forge a decision": lambda client: client.lpush("decisions.accepted", "message"),
    "divert messages": lambda client: client.sadd("_kombu.binding.traces", "traces\x06\x16\x06\x16decisions.accepted"),
    "see a record": lambda client: client.hgetall("kp:trace:1"),
    "run scripts": lambda client: client.eval("return 1", 0),
    "control workers": lambda client: client.publish("/0.celery.pidbox", "message"),
    "forge a result": lambda client: client.set("celery-task-meta-1", "result"),
}
TO_CLIENTS: dict[str, Forbidden] = {
    **{name: TO_PRODUCERS[name] for name in TO_PRODUCERS.keys() - {"count traces", "see a record", "run scripts"}},
    "read the log": lambda client: client.xrange("kp:log:space"),
    "add to the log": lambda client: client.xadd("kp:log:space", {"i": "1"}),
    "read dead letters": lambda client: client.hgetall("kp:dead:1"),
}
TO_READERS: dict[str, Forbidden] = {
    **{name: forbid for name, forbid in TO_PRODUCERS.items() if name != "forge a decision"},
    "forge a plain decision": lambda client: client.lpush("decisions.accepted", "message"),
    "forge a decision on a stream": lambda client: client.xadd("decisions.accepted", {"decision": "1"}),
    "remove a stream": lambda client: client.delete("decisions.accepted"),
    "submit": lambda client: client.lpush("traces", "message"),
    "read the log": lambda client: client.xrange("kp:log:space"),
}
TO_WORKERS: dict[str, Forbidden] = {
    "list keys one by one": lambda client: client.scan(),
    "see what a key takes": lambda client: client.memory_usage("traces"),
}
TO_OPERATORS: dict[str, Forbidden] = {
    name: TO_PRODUCERS[name] for name in ("control workers", "divert messages", "forge a result")
}


@pytest.mark.parametrize(
    ("user", "forbidden"),
    [
        ("producer", TO_ALL | TO_WORKERS | TO_PRODUCERS),
        ("client", TO_ALL | TO_WORKERS | TO_CLIENTS),
        ("reader", TO_ALL | TO_WORKERS | TO_READERS),
        ("worker", TO_ALL | TO_WORKERS),
        ("operator", TO_ALL | TO_OPERATORS),
    ],
)
def test_nothing_else_is_allowed(server: Shipped, user: str, forbidden: dict[str, Forbidden]) -> None:
    with server.connect(user) as client:
        allowed = [name for name, forbid in forbidden.items() if not _is_refused(client, forbid)]
    assert allowed == []


def test_what_the_documents_warn_of_is_so(server: Shipped) -> None:
    with server.connect("client") as client, server.connect("reader") as reader, server.connect("producer") as producer:
        client.hset("kp:trace:another's", mapping={"state": "decided", "decision": "forged"})
        assert client.hget("kp:trace:another's", "decision") == b"forged"
        client.hdel("kp:trace:another's", "state", "decision")
        assert client.hget("kp:trace:another's", "state") is None
        reader.xgroup_create("decisions.accepted", "never acknowledges", mkstream=True)
        producer.lpush("traces", "of any size, any number of times")
    assert server.refused() == []


@pytest.mark.slow
def test_readers_may_read_plain_decisions_and_streams(server: Shipped, tmp_path: Path) -> None:
    endpoints = {"broker.url": server.url("worker"), "redis.url": server.url("worker")}
    settings = load_settings({**endpoints, "results.accepted_via": "stream", "results.plain": True, "queues.results_limit": 1})
    traces = fresh_samples(8)
    with (
        start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker,
        Client(server.settings("client")) as client,
        server.connect("reader") as reader,
    ):
        reader.xgroup_create("decisions.accepted", "readers", id="0", mkstream=True)
        for trace in traces:
            client.submit(trace)
        read = set[str]()

        def all_read() -> bool:
            found: Any = reader.xreadgroup("readers", "one", {"decisions.accepted": ">"}, count=1)
            for _, entries in found:
                for entry, fields in entries:
                    reader.xack("decisions.accepted", "readers", entry)
                    read.add(fields[b"trace_id"].decode())
            if (popped := reader.brpop(["decisions.rejected"], timeout=0.1)) is not None:
                read.add(json.loads(popped[1])["trace_id"])
            return read == {trace["id"] for trace in traces}

        wait_until(all_read)
        _done(server.settings("operator"), "stats", "--set", "results.accepted_via=stream")
    assert server.refused() == []
    assert worker.process.returncode == 0


def test_a_worker_may_call_tasks_by_the_queue_of_another_app(server: Shipped) -> None:
    url = server.url("worker")
    called = {"results.accepted_via": "task", "results.rejected_via": "task", "results.task": "shop.decided"}
    settings = load_settings({"broker.url": url, "redis.url": url, **called})
    with make_celery(settings) as app, Store.open(settings) as store:
        declare_queues(app, list(results_queues(settings).values()))
        Publisher(app, settings, store).publish(Decision.model_validate_json(decision_on("kp:trace:called")))
        assert sum(unread(app, settings, store).values()) == 1
    assert server.refused() == []


def test_a_worker_may_compare_with_a_shadow_and_publish_what_that_decides(server: Shipped) -> None:
    url = server.url("worker")
    settings = load_settings({"broker.url": url, "redis.url": url, "shadow.enabled": True, "shadow.via": "queue"})
    decision = decision_on("kp:trace:shadowed")
    with make_celery(settings) as app, Store.open(settings) as store:
        for comparison in ("one", "another"):
            tally = Tally("code", is_known=False, outcomes="review>accepted")
            store.ledger.commit([Verdict(f"kp:trace:{comparison}", b"digest", decision, "", tally)], comparison)
        publisher = Publisher(app, settings, store)
        assert publisher.shadow is not None
        publisher.publish(Decision.model_validate_json(decision))
        publisher.shadow.publish()
    with server.connect("reader") as reader:
        assert reader.llen("decisions.shadow") == 1
    assert json.loads(_done(server.settings("operator"), "stats"))["domains"] == {"code": 2}
    assert server.refused() == []


def _done(settings: Settings, *arguments: str, code: int = 0) -> str:
    """Run a command of ours, which ends with this code; return what it prints."""
    done = commands.run(*arguments, stdin="y\n", **as_environment(settings))
    assert done.returncode == code, f"{arguments}: {done.stderr}"
    return done.stdout


def _is_refused(client: redis.Redis, forbidden: Forbidden) -> bool:
    try:
        forbidden(client)
    except redis.exceptions.ResponseError as error:
        return (
            isinstance(error, redis.exceptions.NoPermissionError)
            or "can't run this command" in str(error)
            or "ACL" in str(error)
        )
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


def test_what_is_refused_is_said_in_the_words_of_redis_and_of_no_trace(server: Shipped) -> None:
    submission = Submission("kp:trace:1", b"digest", b"marker")
    with (
        Store.open(server.settings("producer")) as store,
        pytest.raises(ServiceUnavailable, match=r"^ledger: Redis refuses: .*NOPERM"),
    ):
        store.ledger.open([submission])
    with server.connect("administrator") as admin:
        admin.set(Keys("kp").record("kp:trace:1"), "no hash")
    with (
        Store.open(server.settings("client")) as store,
        pytest.raises(ServiceUnavailable, match=r"^ledger: Redis refuses: WRONGTYPE") as refused,
    ):
        store.ledger.open([submission])
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
    for package in ("store", "broker/redis_transport"):
        scripts = resources.files("kp_scorer").joinpath(package, "lua").iterdir()
        called = {name.lower() for script in scripts for name in re.findall(r"redis\.call\('(\w+)'", script.read_text("utf-8"))}
        assert called
        assert {f"+{name}" for name in called} <= set(rules.split())


def _use_everything(store: Store, operators: Store, settings: Settings) -> None:
    store.ping()
    ledger, letters, window = store.ledger, store.dead_letters, settings.novelty.window()
    embedder = WordHashEmbedder(settings.embedding, "trace")
    novelty = NoveltyMeter(embedder, store.novelty_log(embedder.space), window)
    decider = Decider(ledger, Policy(), novelty, settings.worker.max_attempts)
    decider.refresh()
    one, other, warmed = (decode_trace(payload, Limits()) for payload in fresh_samples(3))
    submission = Submission(one.id, one.digest(), b"{}")
    assert ledger.open([submission]) == ["pending"]
    assert len(ledger.claim_lost(0, queue_is_empty=True)) <= 1
    ledger.resent(one.id)
    ledger.renew()
    store.drops.note("decisions.rejected")
    assert store.drops.counts() == {"decisions.rejected": 1}
    ledger.release([one.id])
    assert all(isinstance(decided, Decision) for decided in decider.decide([one, other]))
    assert ledger.open([submission]) == ["decided"]
    letters.bury(b'{"id": "kp:trace:bad"}', "invalid", "$: expected more", "kp:trace:bad")
    (found,) = operators.novelty_logs()
    warming = NoveltyMeter(embedder, found, window)
    (vector,) = warming.embed([warmed], alone=False)
    assert warming.place([Candidate(warmed.id, warmed.digest(), vector)]) != [None]
    assert found.info().entries == 3
    assert audit(list(found.entries()), operators.ledger.decided, window, lambda done, total: None).agreeing == 2
    assert (found.erase(one.id), operators.ledger.erase(one.id)) == (1, 1)
    (letter,) = operators.dead_letters.read()
    assert operators.dead_letters.payload(letter.letter_id) == b'{"id": "kp:trace:bad"}'
    assert ledger.counts() == (3, 0, 2, 1)
    assert operators.dead_letters.drop(letter)
    found.clear()
