"""Each way by which decisions reach their readers: read by what a user would read it with, once, whatever happens."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import redis
from amqp.exceptions import NotFound
from click.testing import CliRunner, Result
from kombu import Connection, Queue
from kp_scorer import score_traces
from kp_scorer.broker.backlog import look_at_backlog
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher, open_results, unread
from kp_scorer.cli.main import commands
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Publication, Store

from tests.support.documents import code_with
from tests.support.outcomes import published
from tests.support.processes import CRASHING_WORKER, FAST_WORKER, start_worker, wait_until
from tests.support.rabbitmq import RabbitMQ, own_queues
from tests.support.servers import RedisServer
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


GROUP: Final = "readers"


@contextmanager
def with_groups(settings: Settings, directory: Path) -> Iterator[None]:
    """Make the consumer group that reads a stream."""
    with redis.Redis.from_url(settings.redis.url) as client:
        for name in (settings.queues.accepted, settings.queues.rejected):
            with suppress(redis.ResponseError):
                client.xgroup_create(name, GROUP, id="0", mkstream=True)
    yield


@contextmanager
def with_shop(settings: Settings, directory: Path) -> Iterator[None]:
    """Run a worker of another Celery app."""
    variables = {
        "SHOP_BROKER": settings.broker.url,
        "SHOP_QUEUES": f"{settings.queues.accepted},{settings.queues.rejected}",
        "SHOP_STORE": settings.redis.url,
    }
    flags = ("--pool", "solo", "--loglevel", "info", "--without-gossip", "--without-mingle")
    log = directory / "shop.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "celery", "-A", "tests.support.shop", "worker", *flags]
        shop = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: " ready." in log.read_text("utf-8") or shop.poll() is not None)
        assert shop.poll() is None, log.read_text("utf-8")
        yield
    finally:
        shop.terminate()
        shop.wait(30)
    # Only ids and names: the decision is not printed.
    assert "threshold" not in log.read_text("utf-8")


def read_shop(settings: Settings, name: str) -> list[Received]:
    """What the task of that app was called with, by whatever queue."""
    found = []
    with redis.Redis.from_url(settings.redis.url) as client:
        while (called := client.lpop("shop:received")) is not None:
            found.append(Received(*json.loads(called)))
    return found


def read_stream(settings: Settings, name: str) -> list[Received]:
    """With XREADGROUP and XACK."""
    found = []
    with redis.Redis.from_url(settings.redis.url, decode_responses=True) as client:
        while read := client.xreadgroup(GROUP, "one", {name: ">"}):
            for _, entries in read:
                for entry, fields in entries:
                    found.append(Received(fields["trace_id"], fields["decided_at"], json.loads(fields["decision"])))
                    client.xack(name, GROUP, entry)
    return found


class Way(NamedTuple):
    """A way by which decisions go, and how they are read there."""

    broker: str
    changed: dict[str, Any]
    read: Reader
    around: Callable[[Settings, Path], AbstractContextManager[None]] = lambda settings, directory: nullcontext()
    """What must run meanwhile."""


STREAM: Final = {"results.accepted_via": "stream", "results.rejected_via": "stream"}
TASK: Final = {"results.accepted_via": "task", "results.rejected_via": "task", "results.task": "shop.decided"}
WAYS: Final = {
    "redis queue": Way("redis", {}, read_messages),
    "redis plain": Way("redis", {"results.plain": True}, read_plain),
    "redis stream": Way("redis", STREAM, read_stream, with_groups),
    "redis task": Way("redis", TASK, read_shop, with_shop),
    "rabbitmq queue": Way("rabbitmq", {}, read_messages),
    "rabbitmq plain": Way("rabbitmq", {"results.plain": True}, read_messages),
    "rabbitmq stream": Way("rabbitmq", STREAM, read_stream, with_groups),
    "rabbitmq task": Way("rabbitmq", TASK, read_shop, with_shop),
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
    way, settings = WAYS[name], settings_of(name, request, **changed)
    with way.around(settings, request.getfixturevalue("tmp_path")):
        yield Scene(way, settings)


def settings_of(name: str, request: pytest.FixtureRequest, **changed: Any) -> Settings:
    way = WAYS[name]
    on_redis: Settings = request.getfixturevalue("settings")
    given = way.changed | {"scoring.threshold": THRESHOLD, "broker.visibility_timeout_s": 3} | changed
    if way.broker == "redis":
        urls = {"broker.url": on_redis.broker.url, "redis.url": on_redis.redis.url}
        return load_settings({**own_queues(), **urls, **given})
    rabbitmq: RabbitMQ = request.getfixturevalue("rabbitmq")
    return rabbitmq.settings(**{setting.replace(".", "__"): value for setting, value in given.items()})


@pytest.fixture(params=WAYS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with scene_of(request.param, request) as opened:
        yield opened


def decisions(count: int) -> list[Decision]:
    """Rejected decisions, each on a trace of its own."""
    found = list(score_traces(fresh_samples(count), load_settings({"embedding.embedder": "none", "scoring.threshold": 1})))
    assert {decision.outcome for decision in found} == {"rejected"}
    return found


def publications(made: Iterable[Decision]) -> list[Publication]:
    """To publish them."""
    return [Publication(decision) for decision in made]


def traces_in(found: Iterable[Received]) -> int:
    """On how many traces there are decisions, of which copies may come before others come at all."""
    return len({each.message_id for each in found})


def taken_by_shop(settings: Settings, count: int) -> list[Received]:
    """What the tasks of the other app were called with, once that is on so many traces."""
    found: list[Received] = []

    def look() -> bool:
        found.extend(read_shop(settings, ""))
        return traces_in(found) >= count

    wait_until(look)
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
        found = scene.read_until(lambda found: traces_in(found) == TRACES < len(found))
    by_hand(submitted, found)
    assert max(Counter(each.message_id for each in found).values()) == 2


def test_a_full_one_takes_no_more_until_it_is_read(scene_name: str, request: pytest.FixtureRequest, store: Store) -> None:
    made = decisions(LIMIT + 3)
    with scene_of(scene_name, request, **{"queues.results_limit": LIMIT}) as scene, make_celery(scene.settings) as app:
        publisher = Publisher(app, scene.settings, store)
        errors = publisher.publish_all(publications(made))
        # RabbitMQ takes one more than it is told.
        assert errors.index(next(filter(None, errors))) in (LIMIT, LIMIT + 1)
        assert {type(error) for error in errors[LIMIT + 1 :]} == {ServiceUnavailable}
        assert f"{scene.settings.queues.rejected} is full of unread decisions" in str(errors[-1])
        left = [decision for decision, error in zip(made, errors, strict=True) if error]
        first = scene.read()
        wait_until(lambda: publisher.publish_all(publications(left)) == [None] * len(left))
    assert [each.message_id for each in [*first, *scene.read()]][: LIMIT + 3] == [decision.trace_id for decision in made]


def test_the_oldest_make_room_and_are_counted(scene_name: str, request: pytest.FixtureRequest, store: Store) -> None:
    made = decisions(LIMIT + 3)
    changed = {"queues.results_limit": LIMIT, "queues.rejected_when_full": "drop_oldest"}
    with scene_of(scene_name, request, **changed) as scene, make_celery(scene.settings) as app:
        publisher = Publisher(app, scene.settings, store)
        for decision in made:
            publisher.publish(decision)
        found = [each.message_id for each in scene.read()]
    dropped = store.drops.counts()[scene.settings.queues.rejected]
    assert found == [decision.trace_id for decision in made[dropped:]]
    assert dropped == 3 or scene_name.startswith("rabbitmq")


@pytest.fixture(params=[name for name in WAYS if "task" not in name])
def scene_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", ["redis stream", "rabbitmq stream", "redis task", "rabbitmq task"])
def test_each_outcome_has_a_way_of_its_own(name: str, request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> None:
    with (
        scene_of(name, request, **{"results.rejected_via": "none"}) as scene,
        start_worker(scene.settings, tmp_path / "worker.log", command=FAST_WORKER) as worker,
        Client(scene.settings) as client,
    ):
        for trace in short_traces(TRACES, seed=21):
            client.submit(trace)
        wait_until(lambda: len(worker.events("trace_decided")) == TRACES)
        accepted = [line["trace_id"] for line in worker.events("trace_decided") if line["outcome"] == "accepted"]
        found = scene.read_until(lambda found: traces_in(found) >= len(accepted))
    assert 0 < len(accepted) < TRACES
    by_hand(accepted, found)


@pytest.mark.parametrize("name", ["redis task", "rabbitmq task"])
def test_tasks_that_nobody_takes_stop_at_the_limit(
    name: str, request: pytest.FixtureRequest, store: Store, tmp_path: Path
) -> None:
    made = decisions(LIMIT + 3)
    settings = settings_of(name, request, **{"queues.results_limit": LIMIT})
    if name == "rabbitmq task":
        with Connection(settings.broker.url) as connection, connection.channel() as channel:
            Queue(settings.queues.rejected)(channel).declare()
    with make_celery(settings) as app:
        publisher = Publisher(app, settings, store)
        errors = publisher.publish_all(publications(made))
        assert errors[:LIMIT] == [None] * LIMIT
        assert {str(error) for error in errors[LIMIT:]} == {
            f"results: the queue {settings.queues.rejected} is full of unread decisions"
        }
        with with_shop(settings, tmp_path):
            left = made[LIMIT:]

            def publish_left() -> bool:
                # There may be room for one of them, and not yet for the others.
                left[:] = [one for one, error in zip(left, publisher.publish_all(publications(left)), strict=True) if error]
                return not left

            wait_until(publish_left)
            found = taken_by_shop(settings, len(made))
    by_hand([decision.trace_id for decision in made], found)


@pytest.mark.parametrize("limit", [0, 1_000])
def test_decisions_wait_for_the_queue_that_another_app_declares(
    limit: int, request: pytest.FixtureRequest, store: Store, tmp_path: Path
) -> None:
    settings = settings_of("rabbitmq task", request, **{"queues.results_limit": limit})
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(settings) as client:
        submitted = [client.submit(trace) for trace in short_traces(TRACES, seed=23)]
        line = wait_until(lambda: worker.events("trace_waits"))[0]
        assert "RabbitMQ has no queue" in line["detail"]
        assert "start a worker of the app that takes what is on it" in line["detail"]
        with make_celery(settings) as app:
            assert unread(app, settings, store) == {}
        with with_shop(settings, tmp_path):
            found = taken_by_shop(settings, TRACES)
    by_hand(submitted, found)


def test_our_own_reader_takes_what_is_in_an_envelope_and_what_is_not(settings: Settings, store: Store) -> None:
    made = decisions(4)
    for plain, decision in zip((False, True, True, False), made, strict=True):
        now = settings.model_copy(update={"results": settings.results.model_copy(update={"plain": plain})})
        with make_celery(now) as app:
            Publisher(app, now, store).publish(decision)
    assert [found["trace_id"] for found in published(settings)] == [decision.trace_id for decision in made]


def test_the_consumer_in_the_readme_acts_once_on_each(settings: Settings, store: Store, tmp_path: Path) -> None:
    one, other, last = (decision.model_copy(update={"outcome": "accepted"}) for decision in decisions(3))
    anew = one.model_copy(update={"decided_at": "2030-01-01T00:00:00.000+00:00"})
    code = code_with("ON CONFLICT").replace("redis://queue:6379/0", settings.redis.url)
    seen = tmp_path / "seen"
    acted = []
    with redis.Redis.from_url(settings.redis.url) as client, seen.open("wb") as output:
        for batch in ([one, other, one], [other, anew, anew, last]):
            stream = store.decision_stream("decisions.accepted")
            stream.put(publications(batch), 0, drop_oldest=False)
            with subprocess.Popen([sys.executable, "-uc", code], cwd=tmp_path, stdout=output) as consumer:
                wait_until(lambda: groups(client, stream.name) and not stream.unread())  # noqa: B023
                consumer.kill()
    acted = [line.split()[0] for line in seen.read_text("utf-8").splitlines()]
    assert acted == [decision.trace_id for decision in (one, other, anew, last)]


def groups(client: redis.Redis, name: str) -> list[Any]:
    found: Any = client.xinfo_groups(name)
    return list(found)


def test_a_stream_keeps_what_some_group_has_not_acknowledged(redis_client: redis.Redis, store: Store) -> None:
    stream, name = store.decision_stream("decisions"), "decisions"
    made = decisions(4)
    stream.put(publications(made), 0, drop_oldest=False)
    # Nobody is known to read it.
    assert stream.unread() == 4
    for group in ("quick", "slow"):
        redis_client.xgroup_create(name, group, id="0")
    taken: Any = redis_client.xreadgroup("quick", "one", {name: ">"})
    entries = [entry for entry, _ in taken[0][1]]
    redis_client.xack(name, "quick", *entries)
    assert stream.unread() == 4
    redis_client.xreadgroup("slow", "one", {name: ">"}, count=3)
    assert stream.unread() == 4
    redis_client.xack(name, "slow", entries[0], entries[2])
    # The second is pending, and the fourth was not delivered.
    assert stream.unread() == 3
    redis_client.xgroup_destroy(name, "slow")
    assert stream.unread() == 0
    redis_client.xgroup_create(name, "late", id="$")
    stream.put(publications(made[:1]), 0, drop_oldest=False)
    assert stream.unread() == 1


def test_what_was_read_from_a_stream_makes_room_and_is_not_counted_as_dropped(redis_client: redis.Redis, store: Store) -> None:
    stream, name = store.decision_stream("decisions"), "decisions"
    made = decisions(8)
    redis_client.xgroup_create(name, GROUP, id="0", mkstream=True)
    assert stream.put(publications(made[:4]), 4, drop_oldest=False) == (4, 0, 4)
    assert stream.put(publications(made[4:6]), 4, drop_oldest=False) == (0, 0, 4)
    taken: Any = redis_client.xreadgroup(GROUP, "one", {name: ">"}, count=1)
    redis_client.xack(name, GROUP, taken[0][1][0][0])
    assert stream.put(publications(made[4:6]), 4, drop_oldest=False) == (1, 0, 4)
    assert stream.put(publications(made[5:]), 4, drop_oldest=True) == (3, 3, 4)
    assert store.drops.counts() == {name: 3}
    left: Any = redis_client.xrange(name)
    assert [fields[b"trace_id"].decode() for _, fields in left] == [decision.trace_id for decision in made[4:]]


def test_looking_at_what_waits_on_streams_takes_no_connection_each_time(
    settings: Settings, store: Store, redis_client: redis.Redis
) -> None:
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    settings = load_settings({**urls, "results.accepted_via": "stream", "results.rejected_via": "stream"})
    store.decision_stream(settings.queues.accepted).put(publications(decisions(2)), 0, drop_oldest=False)

    def connected() -> int:
        found: Any = redis_client.info("stats")
        return int(found["total_connections_received"])

    with make_celery(settings) as app:
        assert look_at_backlog(app, settings, store).decisions == {settings.queues.accepted: 2, settings.queues.rejected: 0}
        before = connected()
        look_at_backlog(app, settings, store)
    assert connected() == before


def test_a_stream_takes_decisions_while_redis_is_full(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, Store.open(load_settings({"redis.url": server.url})) as store:
        server.limit_memory(1_000)
        stream = store.decision_stream("decisions")
        assert stream.put(publications(decisions(3)), 2, drop_oldest=True) == (3, 1, 2)
        assert stream.unread() == 2


def test_a_worker_does_not_start_on_what_is_no_stream(settings: Settings, redis_client: redis.Redis, tmp_path: Path) -> None:
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    redis_client.lpush("decisions.accepted", "left")
    changed = load_settings({**urls, **STREAM, "worker.patience_s": 0.1})
    with start_worker(changed, tmp_path / "worker.log", command=FAST_WORKER, ready=False) as worker:
        assert worker.process.wait(30) == 3
    assert "WRONGTYPE decisions.accepted: expected a stream, or nothing" in worker.text()


def test_commands_tell_of_streams(settings: Settings, store: Store) -> None:
    changed = {"results.accepted_via": "stream", "queues.results_limit": 2}
    flags = [flag for name, value in changed.items() for flag in ("--set", f"{name}={value}")]
    accepted = [decision.model_copy(update={"outcome": "accepted"}) for decision in decisions(2)]
    now = load_settings({"broker.url": settings.broker.url, "redis.url": settings.redis.url, **changed})
    with make_celery(now) as app:
        assert Publisher(app, now, store).publish_all(publications([*accepted, *decisions(1)])) == [None] * 3

    def run(command: str) -> Result:
        return CliRunner().invoke(commands, [*command.split(), "--broker-url", settings.broker.url, *flags])

    stats = json.loads(run("stats").stdout)
    assert stats["waiting"] == {"traces": 0, "decisions.rejected": 1, "decisions.accepted": 2}
    assert stats["full"] == ["decisions.accepted"]
    told = "accepted decisions go to the stream decisions.accepted in the Redis of redis.url: read it with XREADGROUP"
    taken = run("decisions")
    assert (taken.exit_code, len(taken.stdout.splitlines())) == (0, 1)
    assert told in taken.stderr
    refused = run("decisions --outcome accepted")
    assert isinstance(refused.exception, SettingsError)
    assert str(refused.exception) == told


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (
            STREAM,
            "the stream decisions.rejected is full of unread decisions, so the workers wait: acknowledge them in each of its",
        ),
        (
            TASK,
            "the queue decisions.rejected is full of unread decisions, so the workers wait: start workers of the Celery app",
        ),
    ],
)
def test_who_waits_in_vain_is_told_what_to_do(
    way: dict[str, str], told: str, settings: Settings, store: Store, tmp_path: Path
) -> None:
    changed = {**way, "broker.url": settings.broker.url, "redis.url": settings.redis.url, "queues.results_limit": "2"}
    full = load_settings(changed)
    with make_celery(full) as app:
        Publisher(app, full, store).publish_all(publications(decisions(2)))
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(fresh_samples(1)[0]), "utf-8")
    flags = [flag for name, value in changed.items() for flag in ("--set", f"{name}={value}")]
    waited = CliRunner().invoke(commands, ["submit", str(file), "--wait", "--timeout", "2.5", *flags])
    assert waited.exit_code == 1
    assert told in waited.stderr
    assert "queues.rejected_when_full" in waited.stderr


def test_decisions_that_call_a_task_are_not_ours_to_take(settings: Settings) -> None:
    with (
        make_celery(settings) as app,
        pytest.raises(SettingsError, match=r"task shop\.decided on the queue decisions\.accepted: workers of its Celery app"),
        open_results(app, load_settings({"redis.url": settings.redis.url, **TASK})),
    ):
        pass
