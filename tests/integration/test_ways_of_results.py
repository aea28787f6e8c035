"""Each way by which decisions reach their readers: read by what a user would read it with, once, whatever happens."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import redis
from amqp.exceptions import NotFound
from kombu import Connection
from kp_scorer import score_traces
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.documents import code_with
from tests.support.outcomes import published
from tests.support.processes import CRASHING_WORKER, FAST_WORKER, start_worker, wait_until
from tests.support.rabbitmq import own_queues
from tests.support.traces import fresh_samples, short_traces

TRACES: Final = 20
LIMIT: Final = 10
THRESHOLD: Final = 0.4
"""Of these short traces some are accepted and some are not."""


class Received(NamedTuple):
    """One decision as its reader got it."""

    message_id: str
    mark: str
    decision: dict[str, Any]


Reader = Callable[[Settings, str], list[Received]]
"""Reads everything that is there now on the queue of this name."""


def read_messages(settings: Settings, name: str) -> list[Received]:
    """With kombu, as any program in Python would."""
    found = []
    # A queue that nothing came to yet may not be there.
    with suppress(NotFound), Connection(settings.broker.url) as connection, connection.channel() as channel:
        while (message := channel.basic_get(name)) is not None:
            message = channel.message_to_python(message)
            message.ack()
            found.append(Received(message.properties["message_id"], message.headers["decided_at"], message.decode()))
    return found


def read_plain(settings: Settings, name: str) -> list[Received]:
    """With BRPOP."""
    found = []
    with redis.Redis.from_url(settings.broker.url) as client:
        while client.llen(name):
            popped: Any = client.brpop([name])
            decision = json.loads(popped[1])
            found.append(Received(decision["trace_id"], decision["decided_at"], decision))
    return found


class Way(NamedTuple):
    """A way by which decisions go, and how they are read there."""

    broker: str
    changed: dict[str, Any]
    read: Reader


WAYS: Final = {
    "redis queue": Way("redis", {}, read_messages),
    "redis plain": Way("redis", {"results.plain": True}, read_plain),
    "rabbitmq queue": Way("rabbitmq", {}, read_messages),
    "rabbitmq plain": Way("rabbitmq", {"results.plain": True}, read_messages),
}


class Scene:
    """A way on servers of its own, with whatever must run there."""

    def __init__(self, way: Way, settings: Settings) -> None:
        self.settings = settings
        self._way = way

    def read(self) -> list[Received]:
        """Read everything that is there now."""
        names = dict.fromkeys((self.settings.queues.accepted, self.settings.queues.rejected))
        return [found for name in names for found in self._way.read(self.settings, name)]

    def read_until(self, is_enough: Callable[[list[Received]], bool]) -> list[Received]:
        """Read until what has come is enough."""
        found: list[Received] = []

        def look() -> bool:
            found.extend(self.read())
            return is_enough(found)

        wait_until(look)
        return found


@contextmanager
def scene_of(name: str, request: pytest.FixtureRequest, **changed: Any) -> Iterator[Scene]:
    way = WAYS[name]
    on_redis: Settings = request.getfixturevalue("settings")
    given = way.changed | {"scoring.threshold": THRESHOLD, "broker.visibility_timeout_s": 3} | changed
    if way.broker == "redis":
        urls = {"broker.url": on_redis.broker.url, "redis.url": on_redis.redis.url}
        yield Scene(way, load_settings({**own_queues(), **urls, **given}))
    else:
        rabbitmq = request.getfixturevalue("rabbitmq")
        yield Scene(way, rabbitmq.settings(**{setting.replace(".", "__"): value for setting, value in given.items()}))


@pytest.fixture(params=WAYS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with scene_of(request.param, request) as opened:
        yield opened


def decisions(count: int) -> list[Decision]:
    """Rejected decisions, each on a trace of its own."""
    found = list(score_traces(fresh_samples(count), load_settings({"embedding.embedder": "none", "scoring.threshold": 1})))
    assert {decision.outcome for decision in found} == {"rejected"}
    return found


def by_hand(trace_ids: list[str], found: list[Received]) -> None:
    """Assert that each trace was decided, and that copies of its decision can be told by id and mark."""
    assert all(each.message_id == each.decision["trace_id"] for each in found)
    assert all(each.mark == each.decision["decided_at"] for each in found)
    once = {(each.message_id, each.mark): each.decision for each in found}
    assert sorted(message_id for message_id, _ in once) == sorted(trace_ids)
    assert all(once[each.message_id, each.mark] == each.decision for each in found)


def test_each_decision_is_read_once_whatever_its_outcome(scene: Scene, tmp_path: Path) -> None:
    with start_worker(scene.settings, tmp_path / "worker.log", command=FAST_WORKER), Client(scene.settings) as client:
        submitted = [client.submit(trace) for trace in short_traces(TRACES, seed=21)]
        found = scene.read_until(lambda found: len(found) >= TRACES)
        assert len(list(client.as_settled(submitted, timeout_s=10))) == TRACES
    assert scene.read() == []
    assert len(found) == TRACES
    by_hand(submitted, found)
    assert {each.decision["outcome"] for each in found} == {"accepted", "rejected"}


def test_a_worker_killed_before_it_acknowledges_makes_copies_with_the_same_mark(scene: Scene, tmp_path: Path) -> None:
    dying = {"CRASH_AT": "published", "CRASH_AFTER": "5"}
    with Client(scene.settings) as client:
        submitted = [client.submit(trace) for trace in short_traces(TRACES, seed=22)]
    with start_worker(scene.settings, tmp_path / "dying.log", command=CRASHING_WORKER, variables=dying, ready=False) as worker:
        assert worker.process.wait(60) == -9
    with start_worker(scene.settings, tmp_path / "worker.log", command=FAST_WORKER):
        found = scene.read_until(lambda found: len({each.message_id for each in found}) == TRACES and len(found) > TRACES)
    by_hand(submitted, found)
    assert max(Counter(each.message_id for each in found).values()) == 2


def test_a_full_one_takes_no_more_until_it_is_read(scene_name: str, request: pytest.FixtureRequest, store: Store) -> None:
    made = decisions(LIMIT + 3)
    with scene_of(scene_name, request, **{"queues.results_limit": LIMIT}) as scene, make_celery(scene.settings) as app:
        publisher = Publisher(app, scene.settings, store.drops)
        errors = publisher.publish_all(made)
        # RabbitMQ takes one more than it is told.
        assert errors.index(next(filter(None, errors))) in (LIMIT, LIMIT + 1)
        assert {type(error) for error in errors[LIMIT + 1 :]} == {ServiceUnavailable}
        assert f"{scene.settings.queues.rejected} is full of unread decisions" in str(errors[-1])
        left = [decision for decision, error in zip(made, errors, strict=True) if error]
        first = scene.read()
        wait_until(lambda: publisher.publish_all(left) == [None] * len(left))
    assert [each.message_id for each in [*first, *scene.read()]][: LIMIT + 3] == [decision.trace_id for decision in made]


def test_the_oldest_make_room_and_are_counted(scene_name: str, request: pytest.FixtureRequest, store: Store) -> None:
    made = decisions(LIMIT + 3)
    changed = {"queues.results_limit": LIMIT, "queues.rejected_when_full": "drop_oldest"}
    with scene_of(scene_name, request, **changed) as scene, make_celery(scene.settings) as app:
        publisher = Publisher(app, scene.settings, store.drops)
        for decision in made:
            publisher.publish(decision)
        found = [each.message_id for each in scene.read()]
    dropped = store.drops.counts()[scene.settings.queues.rejected]
    assert found == [decision.trace_id for decision in made[dropped:]]
    assert dropped == 3 or scene_name.startswith("rabbitmq")


@pytest.fixture(params=[name for name in WAYS if "task" not in name])
def scene_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_our_own_reader_takes_what_is_in_an_envelope_and_what_is_not(settings: Settings, store: Store) -> None:
    made = decisions(4)
    for plain, decision in zip((False, True, True, False), made, strict=True):
        now = settings.model_copy(update={"results": settings.results.model_copy(update={"plain": plain})})
        with make_celery(now) as app:
            Publisher(app, now, store.drops).publish(decision)
    assert [found["trace_id"] for found in published(settings)] == [decision.trace_id for decision in made]


def test_the_consumer_in_the_readme_acts_once_on_each(settings: Settings, store: Store, tmp_path: Path) -> None:
    changed = {"results.plain": True, "queues.rejected": "decisions.accepted"}
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    now = load_settings(changed | urls | {"queues.accepted": "decisions.accepted"})
    one, other, last = decisions(3)
    anew = one.model_copy(update={"decided_at": "2030-01-01T00:00:00.000+00:00"})
    code = code_with("ON CONFLICT").replace("redis://queue:6379/0", settings.redis.url)
    with make_celery(now) as app:
        publisher = Publisher(app, now, store.drops)
        acted = []
        for batch in ([one, other, one], [other, anew, anew, last]):
            publisher.publish_all(batch)
            acted += acted_on(code, now, tmp_path)
    assert acted == [decision.trace_id for decision in (one, other, anew, last)]


def acted_on(code: str, settings: Settings, directory: Path) -> list[str]:
    """Run a consumer until it has read everything and waits for more; return the ids that it printed."""
    seen = directory / "seen"
    with redis.Redis.from_url(settings.broker.url) as client, seen.open("wb") as output:
        before = {each["id"] for each in client.client_list()}

        def waits() -> bool:
            new = [each for each in client.client_list() if each["id"] not in before]
            return not client.llen(settings.queues.accepted) and any("b" in each["flags"] for each in new)

        with subprocess.Popen([sys.executable, "-uc", code], cwd=directory, stdout=output) as consumer:
            wait_until(waits)
            consumer.kill()
    return [line.split()[0] for line in seen.read_text("utf-8").splitlines()]
