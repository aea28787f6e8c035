"""The checker of the chaos tier sees what is wrong: if it did not, the tier would show nothing."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.client import Client
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys

from tests.support.checker import check
from tests.support.fast_worker import WordHashEmbedder
from tests.support.outcomes import only_log, published
from tests.support.traces import short_traces


class Scene(NamedTuple):
    """Five decided and published traces, and where they lie."""

    settings: Settings
    store: Store
    redis_client: redis.Redis
    keys: Keys
    publisher: Publisher
    decisions: list[Decision]

    @property
    def trace_ids(self) -> list[str]:
        return [decision.trace_id for decision in self.decisions]


@pytest.fixture
def scene(settings: Settings, store: Store, redis_client: redis.Redis, keys: Keys) -> Iterator[Scene]:
    window = settings.novelty.window()
    embedder = WordHashEmbedder(settings.embedding, "trace")
    meter = NoveltyMeter(embedder, store.novelty_log(embedder.space), window)
    decider = Decider(store.ledger, Policy(), meter, settings.worker.max_attempts)
    payloads = short_traces(5, seed=1)
    with Client(settings) as client, make_celery(settings) as app:
        for payload in payloads:
            client.submit(payload)
        decided = decider.decide([decode_trace(payload, Limits()) for payload in payloads])
        decisions = [decision for decision in decided if isinstance(decision, Decision)]
        publisher = Publisher(app, settings, store)
        for decision in decisions:
            publisher.publish(decision)
        yield Scene(settings, store, redis_client, keys, publisher, decisions)


def _forget_a_trace(scene: Scene) -> None:
    scene.redis_client.delete(scene.keys.record(scene.trace_ids[0]))


def _bury_a_decided_trace(scene: Scene) -> None:
    scene.store.dead_letters.bury(b"{}", "invalid", "", scene.trace_ids[0])


def _lose_a_published_decision(scene: Scene) -> None:
    for decision in published(scene.settings)[1:]:
        scene.publisher.publish(Decision.model_validate(decision))


def _publish_another_decision(scene: Scene) -> None:
    scene.publisher.publish(scene.decisions[0].model_copy(update={"score": 0.123}))


def _publish_a_decision_on_nothing(scene: Scene) -> None:
    scene.publisher.publish(scene.decisions[0].model_copy(update={"trace_id": "kp:trace:nobody"}))


def _place_a_trace_twice(scene: Scene) -> None:
    log = only_log(scene.store)
    first = next(log.entries())
    fields = {"i": first.trace_id, "d": first.digest, "v": first.vector.tobytes()}
    scene.redis_client.xadd(scene.keys.log(log.space), fields, id="*")  # type: ignore[arg-type]


def _lose_a_place(scene: Scene) -> None:
    log = only_log(scene.store)
    scene.redis_client.xdel(scene.keys.log(log.space), str(next(log.entries()).place))


def _count_one_too_many(scene: Scene) -> None:
    scene.redis_client.hincrby(scene.keys.counts, "submitted", 1)


def test_all_is_well(scene: Scene) -> None:
    check(scene.settings, scene.trace_ids)


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (_forget_a_trace, "neither decided nor dead: 1 "),
        (_bury_a_decided_trace, "both decided and a dead letter: 1 "),
        (_lose_a_published_decision, "decided and never published: 1 "),
        (_publish_another_decision, "published otherwise than stored: "),
        (_publish_a_decision_on_nothing, "published and not decided: 1 "),
        (_place_a_trace_twice, "more than one entry in the log: 1 "),
        (_lose_a_place, "decided without a place: 1 "),
        (_count_one_too_many, "the counts do not add up: "),
    ],
)
def test_what_is_wrong_is_seen(scene: Scene, tamper: Callable[[Scene], None], complaint: str) -> None:
    tamper(scene)
    with pytest.raises(AssertionError, match=f"^{complaint}"):
        check(scene.settings, scene.trace_ids)


def test_a_trace_that_should_be_dead_is_missed(scene: Scene) -> None:
    with pytest.raises(AssertionError, match="decided against expectation: 1 "):
        check(scene.settings, scene.trace_ids, dead=scene.trace_ids[:1])
