"""The checker of the chaos tier sees what is wrong: if it did not, the tier would show nothing."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import redis

from tests.chaos.checker import check
from tests.fast_worker import WordHashEmbedder
from tests.fleet import novelty_logs, published, short_traces
from worker.broker import make_celery
from worker.client import Client
from worker.dead_letters import DeadLetters
from worker.decider import Decider, NoveltyStage
from worker.decision import Decision
from worker.keys import Keys
from worker.ledger import RedisLedger
from worker.novelty import NoveltyCache, RedisLog, Window
from worker.results import Publisher
from worker.scoring import Policy
from worker.settings import Settings
from worker.trace import Limits, decode_trace


class Scene(NamedTuple):
    """Five decided and published traces, and where they lie."""

    settings: Settings
    store: redis.Redis
    keys: Keys
    publisher: Publisher
    decisions: list[Decision]

    @property
    def trace_ids(self) -> list[str]:
        return [decision.trace_id for decision in self.decisions]


@pytest.fixture
def scene(settings: Settings, client: redis.Redis, keys: Keys) -> Iterator[Scene]:
    window = Window.of(settings.novelty)
    embedder = WordHashEmbedder(settings.embedding)
    log = RedisLog(client, keys, embedder.space, window, record_ttl_ms=60_000)
    stage = NoveltyStage(embedder, NoveltyCache(log, window, embedder.dimensions))
    decider = Decider(RedisLedger(client, keys, ttl_ms=60_000), Policy(), stage)
    payloads = short_traces(5, seed=1)
    with Client(settings) as submitter, make_celery(settings) as app:
        for payload in payloads:
            submitter.submit(payload)
        decided = decider.decide([decode_trace(payload, Limits()) for payload in payloads])
        decisions = [decision for decision in decided if isinstance(decision, Decision)]
        publisher = Publisher(app, settings)
        for decision in decisions:
            publisher.publish(decision)
        yield Scene(settings, client, keys, publisher, decisions)


def _forget_a_trace(scene: Scene) -> None:
    scene.store.delete(scene.keys.record(scene.trace_ids[0]))


def _bury_a_decided_trace(scene: Scene) -> None:
    DeadLetters(scene.store, scene.keys, record_ttl_ms=60_000).bury(b"{}", "invalid", "", scene.trace_ids[0])


def _lose_a_published_decision(scene: Scene) -> None:
    for decision in published(scene.settings)[1:]:
        scene.publisher.publish(Decision.model_validate(decision))


def _publish_another_decision(scene: Scene) -> None:
    scene.publisher.publish(scene.decisions[0].model_copy(update={"score": 0.123}))


def _publish_a_decision_on_nothing(scene: Scene) -> None:
    scene.publisher.publish(scene.decisions[0].model_copy(update={"trace_id": "kp:trace:nobody"}))


def _place_a_trace_twice(scene: Scene) -> None:
    (log,) = novelty_logs(scene.settings, scene.store)
    first = next(log.entries())
    scene.store.xadd(log._log, {"i": first.trace_id, "c": first.content, "v": first.vector.tobytes()}, id="*")


def _lose_a_place(scene: Scene) -> None:
    (log,) = novelty_logs(scene.settings, scene.store)
    scene.store.xdel(log._log, str(next(log.entries()).place))


def _count_one_too_many(scene: Scene) -> None:
    scene.store.hincrby(scene.keys.counts, "submitted", 1)


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
