"""The pipeline releases every message that it receives: it acknowledges those that are completed, and requeues the others."""

import gc
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from kombu.message import Message
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import ScorerError, ServiceUnavailable
from kp_scorer.limits import Limits
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.pipeline import Pipeline
from kp_scorer.process.publish import PublishStage
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.decision_stream import Publication
from kp_scorer.store.records import MemoryLedger

from tests.support.processes import PATIENCE_S, wait_until
from tests.support.traces import fresh_samples

AWAY: Final = ServiceUnavailable("results: away")


class RecordingAcknowledger:
    """An acknowledger that records which deliveries it acknowledges and requeues."""

    def __init__(self) -> None:
        self.acknowledged: list[list[Delivery]] = []
        self.requeued: list[Delivery] = []
        self.connection = 0

    def read(self, delivery: Delivery) -> None:
        raise NotImplementedError

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        self.acknowledged.append(list(deliveries))

    def requeue(self, delivery: Delivery) -> None:
        self.requeued.append(delivery)

    def has_lost(self, delivery: Delivery) -> bool:
        return delivery.connection != self.connection

    @property
    def completed(self) -> list[Delivery]:
        return [delivery for together in self.acknowledged for delivery in together]


class Scene:
    """A pipeline with a recording acknowledger, and with a publisher that fails while ``is_away`` is set."""

    def __init__(self, decider: Decider | None = None) -> None:
        self.acknowledger = RecordingAcknowledger()
        self.is_away = threading.Event()
        self.tries = 0
        publisher: Any = SimpleNamespace(
            publish_all=self._publish_all, publication=lambda decision, context, *_: Publication(decision, context)
        )
        self._dead_lettered_by: list[Callable[[], Decision | None]] = []
        dead_letters: Any = SimpleNamespace(dead_letter=lambda payload, *_: self._dead_lettered_by[int(payload)]())
        self.app: Any = SimpleNamespace()
        self.breaks_by: BaseException | None = None
        self.pipeline = Pipeline(
            decider or Decider(MemoryLedger(), Policy(), None, max_attempts=5),
            cast("Any", None),
            PublishStage(self.app, publisher, dead_letters, Settings(), Metrics(())),
            self.acknowledger,
            Metrics(()),
            group_size=8,
            hold_s=3_600.0,
            resend=lambda _: None,
            on_fatal=lambda _: None,
        )

    def receive(self) -> Delivery:
        """Put a submission into the pipeline."""
        (payload,) = fresh_samples(1)
        delivery = Delivery(message(), 0)
        delivery.trace = decode_trace(payload, Limits())
        self.pipeline.put(delivery)
        return delivery

    def receive_invalid(self, dead_letter: Callable[[], Decision | None]) -> Delivery:
        """Put a message that is not a submission into the pipeline."""
        delivery = Delivery(message(str(len(self._dead_lettered_by))), 0)
        delivery.dead_lettering = DeadLettering("malformed", "it is none", deliveries=1)
        self._dead_lettered_by.append(dead_letter)
        self.pipeline.put(delivery)
        return delivery

    def _publish_all(self, publications: Sequence[Publication]) -> list[ScorerError | None]:
        self.tries += bool(publications)
        if self.breaks_by and publications:
            raise self.breaks_by
        return [AWAY if self.is_away.is_set() else None] * len(publications)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.is_away.clear()
    scene.pipeline.stop()


def message(body: str = "") -> Any:
    """Return a message of kombu whose producer asks for no result."""
    return Message(body, channel=SimpleNamespace(), delivery_tag="1", headers={})


def raising(error: BaseException) -> Callable[[], Decision | None]:
    def fail() -> Decision | None:
        raise error

    return fail


def test_a_delivery_that_failed_and_was_completed_later_is_freed(scene: Scene) -> None:
    scene.is_away.set()
    failed = weakref.ref(scene.receive())
    wait_until(lambda: scene.tries)
    scene.is_away.clear()
    wait_until(lambda: scene.acknowledger.acknowledged)
    scene.acknowledger.acknowledged.clear()
    # Each stage may keep its last delivery until another one comes.
    scene.receive()
    wait_until(lambda: scene.acknowledger.acknowledged)
    gc.collect()
    wait_until(lambda: failed() is None)


def test_messages_that_waited_together_are_acknowledged_together(scene: Scene) -> None:
    scene.is_away.set()
    deliveries = [scene.receive() for _ in range(5)]
    wait_until(lambda: all(delivery.waits_for for delivery in deliveries))
    scene.is_away.clear()
    wait_until(lambda: len(scene.acknowledger.completed) == 5)
    assert set(scene.acknowledger.completed) == set(deliveries)
    # A retry may have come before all of them had failed, so that they were published in two groups.
    assert len(scene.acknowledger.acknowledged) <= 2


def test_in_an_outage_of_the_store_only_one_message_is_tried_per_retry(scene: Scene) -> None:
    tries: list[int] = []

    def dead_letter(number: int) -> Callable[[], Decision | None]:
        def fail() -> Decision | None:
            tries.append(number)
            time.sleep(0.2)
            raise ServiceUnavailable("redis: away")

        return fail

    invalid = [scene.receive_invalid(dead_letter(number)) for number in range(20)]
    decided = scene.receive()
    wait_until(lambda: scene.acknowledger.completed == [decided])
    assert len(tries) < len(invalid)
    scene.pipeline.drain()
    wait_until(lambda: set(scene.acknowledger.requeued) == set(invalid))


# SystemExit stands for the panic of a native library, which is not an Exception either.
@pytest.mark.parametrize("error", [ValueError("our fault"), SystemExit()])
@pytest.mark.parametrize("step", ["dead-lettering", "publishing"])
def test_an_unexpected_error_requeues_after_a_backoff_and_the_pipeline_goes_on(
    scene: Scene, error: BaseException, step: str
) -> None:
    started = time.monotonic()
    if step == "publishing":
        scene.breaks_by = error
        failed = scene.receive()
    else:
        failed = scene.receive_invalid(raising(error))
    wait_until(lambda: scene.acknowledger.requeued == [failed])
    assert time.monotonic() - started > 0.5, "it would be redelivered at once, again and again"
    scene.breaks_by = None
    another = scene.receive()
    wait_until(lambda: scene.acknowledger.completed == [another])


def test_a_message_in_flight_is_stalled_until_it_is_retried(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.is_away.set()
    scene.receive()
    wait_until(lambda: scene.tries)
    now = [time.monotonic() + 500]
    monkeypatch.setattr("kp_scorer.process.watchdog.time", SimpleNamespace(monotonic=lambda: now[0]))
    tries = scene.tries
    wait_until(lambda: scene.tries > tries)
    wait_until(lambda: scene.pipeline.delivery_stalled_s() == 0)
    now[0] += 400
    assert scene.pipeline.delivery_stalled_s() == pytest.approx(400)
    monkeypatch.undo()


def test_results_that_cannot_be_stored_keep_nothing_waiting(scene: Scene) -> None:
    tries: list[str] = []

    def store_result(task_id: str, *_: object) -> None:
        tries.append(task_id)
        raise OSError("away")

    scene.app.backend = SimpleNamespace(store_result=store_result, connection_errors=(OSError,))
    scene.is_away.set()
    deliveries = [scene.receive() for _ in range(5)]
    for delivery in deliveries:
        delivery.message.headers = {"id": str(uuid.uuid4()), "ignore_result": False}
    wait_until(lambda: all(delivery.waits_for for delivery in deliveries))
    scene.is_away.clear()
    wait_until(lambda: len(scene.acknowledger.completed) == 5)
    # After the first result that cannot be stored, the others of its group are not tried.
    assert len(tries) == len(scene.acknowledger.acknowledged) < 5


def test_waiting_to_be_decided_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class Slow(Decider):
        def acquire(self, *args: Any, **options: Any) -> Any:
            assert gate.wait(PATIENCE_S)
            return super().acquire(*args, **options)

    scene = Scene(decider=Slow(MemoryLedger(), Policy(), None, max_attempts=5))
    deliveries = [scene.receive() for _ in range(20)]
    now = time.monotonic() + 500
    monkeypatch.setattr("kp_scorer.process.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    assert scene.pipeline.delivery_stalled_s() == 0
    assert scene.pipeline.deciding_stalled_s() >= 400
    monkeypatch.undo()
    gate.set()
    wait_until(lambda: len(scene.acknowledger.completed) == len(deliveries))
    scene.pipeline.stop()
