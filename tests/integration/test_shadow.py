"""A shadow decides beside the live road: all is counted once, what it decides goes to its own queue, and nothing waits."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from amqp.exceptions import NotFound
from click.testing import CliRunner
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import waiting
from kp_scorer.broker.queues import shadow_queue
from kp_scorer.broker.results import Publisher, Results
from kp_scorer.cli.main import commands
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.scoring import decide_again, fingerprint
from kp_scorer.settings import Settings, as_environment, load_settings
from kp_scorer.store import Store
from structlog.testing import capture_logs

from tests.support.builders import decision_on
from tests.support.outcomes import published
from tests.support.processes import CRASHING_WORKER, FAST_WORKER, start_worker, wait_until
from tests.support.rabbitmq import RabbitMQ
from tests.support.traces import fresh_samples, new_id, short_traces

LIMIT: Final = 10
CHANGED: Final[dict[str, Any]] = {
    "scoring.threshold": 0.7,
    "scoring.review": 0.55,
    "scoring.aliases": {"travel": "customer_service"},
    "shadow.enabled": True,
    "shadow.via": "queue",
    "shadow.threshold": 0.6,
    "shadow.review": 0.5,
    "shadow.thresholds": {"code": 0.9},
    "broker.visibility_timeout_s": 3,
}


@pytest.fixture(params=["redis", "rabbitmq"])
def shadowed(request: pytest.FixtureRequest) -> Settings:
    """Settings on either broker by which the shadow decides some of the samples otherwise."""
    if request.param == "redis":
        settings: Settings = request.getfixturevalue("settings")
        return load_settings({"broker.url": settings.broker.url, "redis.url": settings.redis.url, **CHANGED})
    rabbitmq: RabbitMQ = request.getfixturevalue("rabbitmq")
    return rabbitmq.settings(**{name.replace(".", "__"): value for name, value in CHANGED.items()})


@pytest.fixture
def limited(shadowed: Settings) -> Settings:
    """The same with room for few decisions on each queue."""
    return shadowed.model_copy(update={"queues": shadowed.queues.model_copy(update={"results_limit": LIMIT})})


def shadows(settings: Settings) -> list[dict[str, Any]]:
    """Take every decision off the shadow's queue."""
    taken = []
    with make_celery(settings) as app, Store.open(settings) as store, app.connection_for_read() as connection:
        queue = shadow_queue(settings)(connection.default_channel)
        for item in Results([queue], store.dead_letters).take():
            item.acknowledge()
            taken.append(item.decision)
    return taken


def count_waiting(settings: Settings) -> int:
    with make_celery(settings) as app:
        return waiting(app, shadow_queue(settings))


def compared_by(settings: Settings) -> str:
    shadow = settings.shadow.policy()
    assert shadow is not None
    return fingerprint(settings.scoring.policy(), shadow)


def decisions(count: int) -> list[Decision]:
    return [Decision.model_validate_json(decision_on(new_id())) for _ in range(count)]


def ids(found: list[Decision]) -> list[str]:
    return [decision.trace_id for decision in found]


def test_what_the_shadow_decides_is_counted_and_published_and_changes_nothing(shadowed: Settings, tmp_path: Path) -> None:
    payloads = fresh_samples(24)
    with start_worker(shadowed, tmp_path / "worker.log", command=FAST_WORKER), Client(shadowed) as client:
        live = {trace_id: client.wait(trace_id, timeout_s=60) for trace_id in map(client.submit, payloads)}
    # What waits is all there is to see of a shadow's queue here, and a worker that has ended has published all.
    stats = json.loads(CliRunner().invoke(commands, "stats", env=as_environment(shadowed), catch_exceptions=False).stdout)
    assert stats["waiting"][shadowed.queues.shadow] == len(payloads)
    policy = shadowed.shadow.policy()
    assert policy is not None
    again = {trace_id: decide_again(decision, policy) for trace_id, decision in live.items()}
    assert {found["trace_id"]: found for found in shadows(shadowed)} == {
        trace_id: decision.model_dump(mode="json") for trace_id, decision in again.items()
    }
    assert {found["trace_id"]: found["outcome"] for found in published(shadowed)} == {
        trace_id: decision.outcome for trace_id, decision in live.items()
    }
    decided = Counter(decision.domain for decision in live.values())
    known = {"finance", "code", "medical", "customer_service", "travel"}
    assert stats["domains"] == {domain: count for domain, count in decided.items() if domain in known}
    assert stats["unknown_domains"] == {domain: count for domain, count in decided.items() if domain not in known}
    flips: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for trace_id, decision in live.items():
        if decision.outcome != again[trace_id].outcome:
            flips[decision.domain][f"{decision.outcome}>{again[trace_id].outcome}"] += 1
    assert stats["shadow"] == {"decided": decided, "flips": flips}
    assert flips["code"]
    assert {decision.taken_for for decision in live.values()} == {None, "customer_service"}


def test_each_decision_counts_once_whatever_is_delivered_again(shadowed: Settings, store: Store, tmp_path: Path) -> None:
    traces = short_traces(40, seed=30)
    names = {str(trace["id"]) for trace in traces}
    dying = {"CRASH_AT": "committed", "DELIVERED_TWICE": "1"}
    with Client(shadowed) as client:
        client.submit_many(traces)
        with start_worker(shadowed, tmp_path / "dying.log", ready=False, command=CRASHING_WORKER, variables=dying) as worker:
            assert worker.process.wait(60) == -9
        assert 0 < store.ledger.counts().decided < len(traces)
        with start_worker(
            shadowed, tmp_path / "worker.log", command=CRASHING_WORKER, variables={"DELIVERED_TWICE": "1"}
        ) as worker:
            wait_until(lambda: len({line["trace_id"] for line in worker.events("trace_decided")}) == len(traces))
            wait_until(lambda: len(worker.events("trace_decided")) > len(traces))
    counted = store.tallies.read(compared_by(shadowed))
    assert sum(counted.domains.values()) == store.ledger.counts().decided == len(traces)
    assert sum(sum(found.values()) for found in counted.outcomes.values()) == len(traces)
    assert {found["trace_id"] for found in shadows(shadowed)} == names


def test_a_full_queue_of_the_shadows_holds_nothing_up(limited: Settings, tmp_path: Path) -> None:
    load = short_traces(4 * LIMIT, seed=31)
    found = set[str]()
    with start_worker(limited, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(limited) as client:
        client.submit_many(load)

        def all_read() -> bool:
            found.update(decision["trace_id"] for decision in published(limited))
            return found == {trace["id"] for trace in load}

        wait_until(all_read)
        assert worker.events("shadow_dropped") == []
    # RabbitMQ notices a little later.
    wait_until(lambda: count_waiting(limited) <= LIMIT)
    assert len(shadows(limited)) == LIMIT


def test_the_newest_stay(limited: Settings, store: Store) -> None:
    found = decisions(3 * LIMIT)
    with make_celery(limited) as app:
        shadow = Publisher(app, limited, store).shadow
        assert shadow is not None
        for start in range(0, len(found), LIMIT // 2):
            shadow.take(found[start : start + LIMIT // 2])
            shadow.publish()
        wait_until(lambda: waiting(app, shadow_queue(limited)) == LIMIT)
    assert [decision["trace_id"] for decision in shadows(limited)] == ids(found)[-LIMIT:]


def test_what_cannot_be_published_in_time_gives_way_to_what_comes(shadowed: Settings, store: Store) -> None:
    (one,) = decisions(1)
    with make_celery(shadowed) as app, capture_logs() as lines:
        shadow = Publisher(app, shadowed, store).shadow
        assert shadow is not None
        shadow.take([one] * 2_500)
        shadow.publish()
    assert count_waiting(shadowed) == 2_000
    assert [(line["event"], line["count"]) for line in lines] == [("shadow_dropped", 500)]


def test_live_decisions_go_out_while_the_shadows_queue_is_a_neighbours(
    settings: Settings, store: Store, redis_client: redis.Redis
) -> None:
    settings = load_settings({"broker.url": settings.broker.url, "redis.url": settings.redis.url, **CHANGED})
    one, two, three = decisions(3)
    redis_client.set(settings.queues.shadow, "a neighbour's")
    with make_celery(settings) as app:
        publisher = Publisher(app, settings, store)
        assert publisher.shadow is not None
        publisher.publish(one)
        with capture_logs() as lines, pytest.raises(ServiceUnavailable, match="WRONGTYPE"):
            publisher.shadow.publish()
        assert [(line["event"], line["count"]) for line in lines] == [("shadow_dropped", 1)]
        publisher.publish(two)
        # A process that ends does not wait for it.
        publisher.shadow.flush()
        redis_client.delete(settings.queues.shadow)
        publisher.publish(three)
        publisher.shadow.publish()
    assert [found["trace_id"] for found in published(settings)] == ids([one, two, three])
    assert [found["trace_id"] for found in shadows(settings)] == ids([two, three])


def test_a_queue_that_is_gone_is_made_anew_and_one_that_refuses_is_not_waited_for(rabbitmq: RabbitMQ, store: Store) -> None:
    settings = rabbitmq.settings(**{name.replace(".", "__"): value for name, value in CHANGED.items()})
    found = decisions(4)
    with make_celery(settings) as app, Connection(settings.broker.url) as connection:
        publisher = Publisher(app, settings, store)
        assert publisher.shadow is not None
        for decision in found[:2]:
            publisher.publish(decision)
            publisher.shadow.publish()
            assert rabbitmq.delete("shadow") == 1
        # One that somebody has made, and that takes nothing.
        full = {"x-queue-type": "classic", "x-max-length": 0, "x-overflow": "reject-publish"}
        connection.default_channel.queue_declare(settings.queues.shadow, durable=True, auto_delete=False, arguments=full)
        with capture_logs() as lines:
            for decision in found[2:]:
                publisher.publish(decision)
            publisher.shadow.publish()
    assert [(line["event"], line["count"]) for line in lines] == [("shadow_dropped", 2)]
    assert [decision["trace_id"] for decision in published(settings)] == ids(found)


def test_a_shadow_that_goes_nowhere_is_counted_and_no_queue_is_made(rabbitmq: RabbitMQ, store: Store, tmp_path: Path) -> None:
    changed = CHANGED | {"shadow.via": "none"}
    settings = rabbitmq.settings(**{name.replace(".", "__"): value for name, value in changed.items()})
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER), Client(settings) as client:
        for trace_id in [client.submit(trace) for trace in short_traces(3, seed=32)]:
            client.wait(trace_id, timeout_s=60)
    assert sum(sum(found.values()) for found in store.tallies.read(compared_by(settings)).outcomes.values()) == 3
    with Connection(settings.broker.url) as connection, connection.channel() as channel, pytest.raises(NotFound):
        channel.queue_declare(settings.queues.shadow, passive=True)
    stats = json.loads(CliRunner().invoke(commands, "stats", env=as_environment(settings), catch_exceptions=False).stdout)
    assert settings.queues.shadow not in stats["waiting"]
