"""Decisions published in any of the ways are read once each, whatever happens, by clients that users would choose."""

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import redis
from amqp.exceptions import NotFound
from kombu import Connection, Queue
from kp_scorer.broker.backlog import unread_decisions
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store
from kp_scorer.store.decision_stream import Publication, Room

from tests.support.builders import decision
from tests.support.changed_settings import with_changed
from tests.support.commands import command
from tests.support.documents import code_with
from tests.support.processes import CRASHING_WORKER, PATIENCE_S, at_work, free_port, opened, start_worker, wait_until
from tests.support.prometheus import scraped
from tests.support.rabbitmq import declare_as_worker, default_queues
from tests.support.traces import fresh_samples, rows_in, short_traces

TRACES: Final = 20
LIMIT: Final = 10
ROOM: Final = Room(LIMIT)
THRESHOLD: Final = 0.4
"""A threshold that some of the short traces reach and some do not."""


class Received(NamedTuple):
    """A decision as its reader received it."""

    message_id: str
    mark: str
    decision: dict[str, Any]


Reader = Callable[[Settings, str], list[Received]]
"""A function that reads everything that is now on the queue of this name."""


def read_messages(settings: Settings, name: str) -> list[Received]:
    """Read messages with kombu, as any Python program might."""
    received = []
    # A queue on which no message has arrived may not exist yet.
    with suppress(NotFound), Connection(settings.broker.url) as connection, connection.channel() as channel:
        while (message := channel.basic_get(name)) is not None:
            message = channel.message_to_python(message)
            message.ack()
            received.append(Received(message.properties["message_id"], message.headers["decided_at"], message.decode()))
    return received


@contextmanager
def celery_worker(app: str, directory: Path, **variables: str) -> Iterator[Path]:
    """Run a worker of another Celery app, given by its module; yield the path of its log."""
    log = directory / f"{app}.log"
    program = [sys.executable, "-m", "celery", "-A", app, "--workdir", str(directory), "worker"]
    flags = ("--pool", "solo", "--loglevel", "info", "--without-gossip", "--without-mingle")
    environment = os.environ | {"PYTHONUNBUFFERED": "1", **variables}
    with log.open("wb") as output:
        process = subprocess.Popen([*program, *flags], env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: " ready." in log.read_text("utf-8") or process.poll() is not None)
        assert process.poll() is None, log.read_text("utf-8")
        yield log
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@contextmanager
def with_shop(settings: Settings, directory: Path) -> Iterator[None]:
    queues = f"{settings.queues.name('accepted')},{settings.queues.name('rejected')}"
    variables = {"SHOP_BROKER": settings.broker.url, "SHOP_QUEUES": queues, "SHOP_STORE": settings.redis.url}
    with celery_worker("tests.support.shop", directory, **variables) as log:
        yield
    # Celery logs only ids and names, and must not print a decision.
    assert "threshold" not in log.read_text("utf-8")


def read_shop(settings: Settings, name: str) -> list[Received]:
    """Return the arguments with which the task of the shop was called, whatever the queue."""
    received = []
    with redis.Redis.from_url(settings.redis.url) as client:
        while (called := client.lpop("shop:received")) is not None:
            received.append(Received(*json.loads(called)))
    return received


def read_stream(settings: Settings, name: str) -> list[Received]:
    """Read a stream with XREADGROUP and XACK, as a group that the first reader makes."""
    received = []
    with redis.Redis.from_url(settings.redis.url, decode_responses=True) as client:
        with suppress(redis.ResponseError):
            client.xgroup_create(name, "readers", id="0", mkstream=True)
        while read := client.xreadgroup("readers", "consumer", {name: ">"}):
            for _, entries in read:
                for entry, fields in entries:
                    received.append(Received(fields["trace_id"], fields["decided_at"], json.loads(fields["decision"])))
                    client.xack(name, "readers", entry)
    return received


class Way(NamedTuple):
    """A way of publishing decisions, with its reader."""

    broker: str
    changed: dict[str, Any]
    read: Reader
    around: Callable[[Settings, Path], AbstractContextManager[None]] = lambda settings, directory: nullcontext()
    """A context that must be open while decisions are published and read."""


STREAM: Final = {"results__via": "stream"}
TASK: Final = {"results__via": "task", "results__task": "shop.decided"}
WAYS: Final = {
    "redis queue": Way("redis", {}, read_messages),
    "redis stream": Way("redis", STREAM, read_stream),
    "redis task": Way("redis", TASK, read_shop, with_shop),
    "rabbitmq queue": Way("rabbitmq", {}, read_messages),
    "rabbitmq task": Way("rabbitmq", TASK, read_shop, with_shop),
}


class Scene(NamedTuple):
    """A way of publishing, on servers that belong to the test."""

    way: Way
    settings: Settings

    def read(self) -> list[Received]:
        names = self.settings.queues.name("accepted"), self.settings.queues.name("rejected")
        return [decision for name in names for decision in self.way.read(self.settings, name)]

    def read_until(self, is_enough: Callable[[list[Received]], bool]) -> list[Received]:
        received: list[Received] = []

        def look() -> bool:
            received.extend(self.read())
            return is_enough(received)

        wait_until(look)
        return received


def scene_of(name: str, request: pytest.FixtureRequest, **changed: Any) -> Scene:
    way = WAYS[name]
    chosen = {"scoring__threshold": THRESHOLD, "broker__visibility_timeout_s": 3, **way.changed, **changed}
    if way.broker == "redis":
        return Scene(way, with_changed(request.getfixturevalue("settings"), **chosen))
    return Scene(way, request.getfixturevalue("rabbitmq").settings(**chosen))


@pytest.fixture(params=WAYS)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """A way of publishing, with what it needs running.

    Half of all traces are sampled for review, except where decisions call a task, which would be called twice.
    """
    opened = scene_of(request.param, request, review__sample=0.0 if "task" in request.param else 0.5)
    with opened.way.around(opened.settings, tmp_path):
        yield opened


def decisions(count: int) -> list[Decision]:
    """Return rejected decisions, each on a different trace."""
    return [decision(f"kp:trace:{number}", outcome="rejected") for number in range(count)]


def publications(made: Iterable[Decision]) -> list[Publication]:
    return [Publication(decision) for decision in made]


def traces_in(received: Iterable[Received]) -> int:
    """Return the number of traces that have a decision; some decisions may have several copies before others arrive at all."""
    return len({each.message_id for each in received})


def assert_each_once(trace_ids: list[str], received: list[Received]) -> None:
    """Assert that each trace has one decision, and that only copies of the same decision share id and mark."""
    assert all(each.message_id == each.decision["trace_id"] for each in received)
    assert all(each.mark == each.decision["decided_at"] for each in received)
    once = {(each.message_id, each.mark): each.decision for each in received}
    assert sorted(message_id for message_id, _ in once) == sorted(trace_ids)
    assert all(once[each.message_id, each.mark] == each.decision for each in received)


def test_each_decision_is_read_once_and_copies_of_a_killed_worker_have_its_mark(scene: Scene, tmp_path: Path) -> None:
    dying = {"CRASH_AT": "published", "CRASH_AFTER": "5"}
    with Client(scene.settings) as client:
        before = [client.submit(trace) for trace in short_traces(TRACES, seed=22)]
    with start_worker(scene.settings, tmp_path / "dying.log", command=CRASHING_WORKER, variables=dying, ready=False) as worker:
        assert worker.process.wait(PATIENCE_S) == -9
    with at_work(scene.settings, tmp_path) as (_, client):
        first = scene.read_until(lambda received: traces_in(received) == TRACES < len(received))
        assert_each_once(before, first)
        assert max(Counter(each.message_id for each in first).values()) == 2
        submitted = [client.submit(trace) for trace in short_traces(TRACES, seed=21)]
        received = scene.read_until(lambda received: {each.message_id for each in received} >= set(submitted))
        assert len(list(client.as_completed(submitted, timeout_s=PATIENCE_S))) == TRACES
    # Meanwhile, more copies of the first decisions may have arrived.
    received = [each for each in [*received, *scene.read()] if each.message_id in submitted]
    assert len(received) == TRACES
    assert_each_once(submitted, received)
    assert {each.decision["outcome"] for each in received} == {"accepted", "rejected"}
    decided = {each.message_id: Decision.model_validate(each.decision) for each in [*first, *received]}
    sampled = {trace_id: decision for trace_id, decision in decided.items() if decision.sampled}
    assert len(sampled) < len(decided)
    assert bool(sampled) == bool(scene.settings.review.sample)
    reviewed = scene.way.read(scene.settings, scene.settings.queues.name("review"))
    assert {each.message_id: Decision.model_validate(each.decision) for each in reviewed} == sampled


@pytest.mark.parametrize("name", ["redis task", "rabbitmq task"])
def test_calls_of_a_task_stop_at_the_limit_until_they_are_consumed(
    name: str, request: pytest.FixtureRequest, store: Store, tmp_path: Path
) -> None:
    made = decisions(LIMIT + 3)
    scene = scene_of(name, request, queues__results_limit=LIMIT)
    settings = scene.settings
    if name == "rabbitmq task":
        with Connection(settings.broker.url) as connection, connection.channel() as channel:
            Queue(settings.queues.name("rejected"))(channel).declare()
    with make_celery(settings) as app:
        publisher = Publisher(app, settings, store)
        errors = publisher.publish_all(publications(made))
        assert errors[:LIMIT] == [None] * LIMIT
        assert {str(error) for error in errors[LIMIT:]} == {
            f"results: the queue {settings.queues.name('rejected')} is full of unread decisions"
        }
        with with_shop(settings, tmp_path):
            left = made[LIMIT:]

            def publish_left() -> bool:
                # There may be room for some of these, and not yet for the others.
                errors = publisher.publish_all(publications(left))
                left[:] = [decision for decision, error in zip(left, errors, strict=True) if error]
                return not left

            wait_until(publish_left)
            received = scene.read_until(lambda received: traces_in(received) == len(made))
    assert_each_once([decision.trace_id for decision in made], received)


def test_decisions_wait_for_the_queue_that_another_app_declares(
    request: pytest.FixtureRequest, store: Store, tmp_path: Path
) -> None:
    scene = scene_of("rabbitmq task", request)
    settings = with_changed(scene.settings, metrics__port=free_port())
    with at_work(settings, tmp_path) as (worker, client):
        submitted = [client.submit(trace) for trace in short_traces(TRACES, seed=23)]
        line = wait_until(lambda: worker.events("trace_waits"))[0]
        assert "RabbitMQ has no queue" in line["detail"]
        assert "start a worker of the app that consumes it" in line["detail"]
        with make_celery(settings) as app:
            assert unread_decisions(app, settings, store, ()).counts == {}
        wait_until(lambda: scraped(settings)["kp_scorer_waiting_seconds"] > 1)
        findings = rows_in(command(settings, "doctor").stdout)
        assert line["detail"] in [row["detail"] for row in findings if (row["check"], row["state"]) == ("queues", "wrong")]
        with with_shop(settings, tmp_path):
            received = scene.read_until(lambda received: traces_in(received) == TRACES)
        wait_until(lambda: scraped(settings)["kp_scorer_waiting_seconds"] == 0)
    assert_each_once(submitted, received)


@pytest.mark.slow
def test_a_task_of_another_app_gets_decisions_by_the_documented_example(
    rabbitmq_url: str, settings: Settings, tmp_path: Path
) -> None:
    first, second = fresh_samples(2)
    chosen = tomllib.loads(code_with('task = "kept.store"'))
    changed = {f"{section}__{name}": value for section, values in chosen.items() for name, value in values.items()}
    with default_queues(rabbitmq_url, settings.redis.url) as default_names:
        # A worker without these settings comes first: it declares decisions.accepted.
        with at_work(default_names, tmp_path) as (_, client):
            client.wait(client.submit(first), timeout_s=PATIENCE_S)
        (tmp_path / "kept.py").write_text(code_with('Celery("kept"'))
        settings = with_changed(default_names, scoring__threshold=0.0, **changed)
        with (
            celery_worker("kept", tmp_path, KP_BROKER_URL=settings.broker.url) as log,
            at_work(settings, tmp_path) as (_, client),
        ):
            trace_id = client.wait(client.submit(second), timeout_s=PATIENCE_S).trace_id
            wait_until(lambda: trace_id in log.read_text())


def test_the_documented_reader_acts_once_on_each(settings: Settings, store: Store, tmp_path: Path) -> None:
    first, second, last = (decision.model_copy(update={"outcome": "accepted"}) for decision in decisions(3))
    anew = first.model_copy(update={"decided_at": "2030-01-01T00:00:00.000+00:00"})
    variables = os.environ | as_environment(with_changed(settings, **STREAM))
    reader = [sys.executable, "-uc", code_with("ON CONFLICT")]
    printed = tmp_path / "printed"
    with redis.Redis.from_url(settings.redis.url) as client, printed.open("wb") as output:
        for batch in ([first, second, first], [second, anew, anew, last]):
            stream = store.decision_stream("decisions.accepted")
            stream.publish(publications(batch), ROOM)
            with opened(*reader, env=variables, cwd=tmp_path, stdout=output):
                wait_until(lambda: client.xinfo_groups(stream.name) and not stream.count_unread())  # noqa: B023
    acted = [line.split()[0] for line in printed.read_text("utf-8").splitlines()]
    assert acted == [decision.trace_id for decision in (first, second, anew, last)]


def test_stream_entries_stay_unread_until_every_group_has_acknowledged_them(redis_client: redis.Redis, store: Store) -> None:
    stream, name = store.decision_stream("decisions"), "decisions"
    made = decisions(4)
    stream.publish(publications(made), ROOM)
    # While no group is known, all entries count as unread.
    assert stream.count_unread() == 4
    for group in ("quick", "slow"):
        redis_client.xgroup_create(name, group, id="0")
    delivered: Any = redis_client.xreadgroup("quick", "consumer", {name: ">"})
    entries = [entry for entry, _ in delivered[0][1]]
    redis_client.xack(name, "quick", *entries)
    assert stream.count_unread() == 4
    redis_client.xreadgroup("slow", "consumer", {name: ">"}, count=3)
    assert stream.count_unread() == 4
    redis_client.xack(name, "slow", entries[0], entries[2])
    # For the slow group, the second entry is pending, and the fourth has not been delivered.
    assert stream.count_unread() == 3
    redis_client.xgroup_destroy(name, "slow")
    assert stream.count_unread() == 0
    redis_client.xgroup_create(name, "late", id="$")
    stream.publish(publications(made[:1]), ROOM)
    assert stream.count_unread() == 1


def test_a_worker_does_not_start_on_a_list_named_as_its_stream(settings: Settings, redis_client: redis.Redis) -> None:
    redis_client.lpush("decisions.accepted", "left")
    with pytest.raises(ServiceUnavailable, match=r"WRONGTYPE decisions\.accepted: expected a stream, or nothing"):
        declare_as_worker(with_changed(settings, **STREAM), patience_s=0.1)


def test_decisions_reads_streams_only_as_a_group_that_it_is_given(settings: Settings, store: Store) -> None:
    streamed = with_changed(settings, results__via="stream", queues__results_limit=2)
    accepted = [decision.model_copy(update={"outcome": "accepted"}) for decision in decisions(2)]
    with make_celery(streamed) as app:
        assert Publisher(app, streamed, store).publish_all(publications([*accepted, *decisions(3)[2:]])) == [None] * 3

    stats = json.loads(command(streamed, "stats").stdout)
    assert stats["waiting"] == {"traces": 0, "decisions.rejected": 1, "decisions.accepted": 2, "decisions.revised": 0}
    assert stats["full"] == ["decisions.accepted"]
    where = "the streams decisions.accepted in the Redis of redis.url"
    refused = command(streamed, "decisions", "--outcome", "accepted")
    assert isinstance(refused.exception, SettingsError)
    assert str(refused.exception) == f"decisions go to {where}: read them with XREADGROUP, or name a consumer group"
    printed = command(streamed, "decisions", "--group", "readers")
    assert (printed.exit_code, len(printed.stdout.splitlines())) == (0, 3)
