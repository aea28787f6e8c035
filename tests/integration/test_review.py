"""What is neither accepted nor rejected goes to a queue of its own, for a person to look at."""

from collections import Counter
from pathlib import Path

import pytest
import redis
from amqp.exceptions import NotFound
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.client import Client
from kp_scorer.errors import SettingsError
from kp_scorer.offline import score_traces
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.outcomes import published
from tests.support.processes import FAST_WORKER, start_worker
from tests.support.rabbitmq import RabbitMQ
from tests.support.traces import fresh_samples


@pytest.fixture(params=["redis", "rabbitmq"])
def reviewing(request: pytest.FixtureRequest) -> Settings:
    """Settings on either broker that have about a third of the samples reviewed."""
    changed = {"scoring.threshold": 0.7, "scoring.review": 0.55, "scoring.submitted_thresholds": True}
    if request.param == "redis":
        settings: Settings = request.getfixturevalue("settings")
        return load_settings({"broker.url": settings.broker.url, "redis.url": settings.redis.url, **changed})
    rabbitmq: RabbitMQ = request.getfixturevalue("rabbitmq")
    return rabbitmq.settings(**{name.replace(".", "__"): value for name, value in changed.items()})


@pytest.fixture(params=["redis", "rabbitmq"])
def on_either_broker(request: pytest.FixtureRequest) -> Settings:
    """Settings on either broker that have nothing reviewed."""
    if request.param == "redis":
        return request.getfixturevalue("settings")  # type: ignore[no-any-return]
    rabbitmq: RabbitMQ = request.getfixturevalue("rabbitmq")
    return rabbitmq.settings()


def test_what_is_to_be_reviewed_has_a_queue_of_its_own(reviewing: Settings, tmp_path: Path) -> None:
    payloads = fresh_samples(24)
    # It asks for less than any trace has.
    payloads[0]["metadata"]["quality_threshold"] = 0.0
    with start_worker(reviewing, tmp_path / "worker.log", command=FAST_WORKER), Client(reviewing) as client:
        decided = {trace_id: client.wait(trace_id, timeout_s=60) for trace_id in map(client.submit, payloads)}
    outcomes = Counter(decision.outcome for decision in decided.values())
    assert min(outcomes[outcome] for outcome in ("accepted", "review", "rejected")) > 0
    chosen = decided[payloads[0]["id"]]
    assert (chosen.outcome, chosen.threshold, chosen.threshold_source) == ("accepted", 0.0, "submission")
    assert {decision.review for decision in decided.values()} == {0.55, None}
    # A worker that has ended has published what it decided.
    reviewed = {decision["trace_id"] for decision in published(reviewing, "review")}
    assert reviewed == {trace_id for trace_id, decision in decided.items() if decision.outcome == "review"}
    assert {decision["trace_id"] for decision in published(reviewing)} == decided.keys() - reviewed


def test_without_reviews_there_is_no_queue_for_them(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    settings = rabbitmq.settings()
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER):
        assert published(settings) == []
    with Connection(settings.broker.url) as connection, connection.channel() as channel, pytest.raises(NotFound):
        channel.queue_declare(settings.queues.review, passive=True)


def test_a_decision_for_review_is_published_also_when_there_are_no_reviews_any_more(on_either_broker: Settings) -> None:
    all_reviewed = {"embedding.embedder": "none", "scoring.threshold": 1.0, "scoring.review": 0.0}
    (decision,) = score_traces(fresh_samples(1), load_settings(all_reviewed))
    assert decision.outcome == "review"
    with make_celery(on_either_broker) as app, Store.open(on_either_broker) as store:
        Publisher(app, on_either_broker, store).publish(decision)
    assert published(on_either_broker) == []
    assert [found["trace_id"] for found in published(on_either_broker, "review")] == [decision.trace_id]


def test_who_reads_decisions_takes_no_tasks_of_another_app(settings: Settings, redis_client: redis.Redis) -> None:
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    names = {"queues.accepted": "shop", "queues.rejected": "shop", "results.task": "shop.decided"}
    of_shop = load_settings({**urls, **names, "results.accepted_via": "task", "results.rejected_via": "none"})
    redis_client.lpush("shop", "a task of the shop")
    for outcome in (None, "rejected"):
        with pytest.raises(SettingsError, match="workers of its Celery app take them"):
            published(of_shop, outcome)
    assert redis_client.lrange("shop", 0, -1) == [b"a task of the shop"]
