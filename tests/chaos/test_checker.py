"""The checker of the chaos tier reports each violation; if it missed one, the tier would pass and prove nothing."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.client import Client
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.limits import Limits
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.keys import Keys

from tests.support.fast_worker import WordHashEmbedder
from tests.support.outcomes import check, only_log, publish, published
from tests.support.traces import short_traces


class Scene(NamedTuple):
    """Five decided and published traces, with the store and the publisher through which a test tampers with them."""

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
            publish(publisher, decision)
        yield Scene(settings, store, redis_client, keys, publisher, decisions)


def _lose_a_published_decision(scene: Scene) -> None:
    for decision in published(scene.settings)[1:]:
        publish(scene.publisher, Decision.model_validate(decision))


def _publish(scene: Scene, **changes: Any) -> None:
    publish(scene.publisher, scene.decisions[0].model_copy(update=changes))


def _place_a_trace_twice(scene: Scene) -> None:
    log = only_log(scene.store)
    first = next(log.entries())
    fields = {"i": first.trace_id, "d": first.digest, "v": first.vector.tobytes()}
    scene.redis_client.xadd(scene.keys.of_log(log.space).log, fields, id="*")  # type: ignore[arg-type]


def _lose_a_place(scene: Scene) -> None:
    log = only_log(scene.store)
    scene.redis_client.xdel(scene.keys.of_log(log.space).log, str(next(log.entries()).place))


def test_a_sound_state_passes(scene: Scene) -> None:
    check(scene.settings, scene.trace_ids)


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (lambda scene: scene.redis_client.delete(scene.keys.record(scene.trace_ids[0])), "neither decided nor dead: 1 "),
        (
            lambda scene: scene.store.dead_letters.dead_letter(b"{}", DeadLettering("invalid", "", scene.trace_ids[0])),
            "both decided and a dead letter: 1 ",
        ),
        (_lose_a_published_decision, "decided and never published: 1 "),
        (partial(_publish, score=0.123), "published otherwise than stored: "),
        (partial(_publish, trace_id="kp:trace:nobody"), "published and not decided: 1 "),
        (_place_a_trace_twice, "more than one entry in the log: 1 "),
        (_lose_a_place, "decided without a place: 1 "),
        (lambda scene: scene.redis_client.hincrby(scene.keys.counts, "submitted", 1), "the counts do not add up: "),
    ],
)
def test_each_violation_is_reported(scene: Scene, tamper: Callable[[Scene], object], complaint: str) -> None:
    tamper(scene)
    with pytest.raises(AssertionError, match=f"^{complaint}"):
        check(scene.settings, scene.trace_ids)


def test_a_decided_trace_that_should_be_dead_is_reported(scene: Scene) -> None:
    with pytest.raises(AssertionError, match="decided against expectation: 1 "):
        check(scene.settings, scene.trace_ids, dead=scene.trace_ids[:1])
