"""What is taken in hand is let go of, whatever comes of it: acknowledged once it has ended, or given back."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
from celery.worker import state
from kombu.message import Message
from kp_scorer.broker.task_message import TASK_NAME, TaskMessage
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import EmbedderSick, ScorerError, ServiceUnavailable
from kp_scorer.process.delivery import Burial, Delivery, SubmissionRequest
from kp_scorer.process.delivery_spans import DeliverySpans
from kp_scorer.process.observer import Observer
from kp_scorer.process.pipeline import Pipeline
from kp_scorer.process.settling import Settling, dead_result
from kp_scorer.scoring import Policy
from kp_scorer.spans import NO_RECORDER
from kp_scorer.store import MemoryLedger, Publication

from tests.support.processes import wait_until
from tests.support.traces import fresh_samples

PATIENCE_S: Final = 10.0
AWAY: Final = ServiceUnavailable("results: away")


class NativePanicError(BaseException):
    """What a native library raises that is no Exception."""


class Hands:
    """Notes what it lets go of."""

    def __init__(self) -> None:
        self.acknowledged: list[list[Delivery]] = []
        self.given_back: list[Delivery] = []
        self.connection = 0

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        self.acknowledged.append(list(deliveries))

    def give_back(self, delivery: Delivery) -> None:
        self.given_back.append(delivery)

    def has_lost(self, delivery: Delivery) -> bool:
        return delivery.connection != self.connection

    @property
    def ended(self) -> list[Delivery]:
        return [delivery for together in self.acknowledged for delivery in together]


class Scene:
    """A pipeline between hands and a place to publish to, which is away while the scene says so."""

    def __init__(self, hold_s: float = 3_600.0, decider: Any = None) -> None:
        self.hands = Hands()
        self.is_away = threading.Event()
        self.published: list[str] = []
        self.tries = 0
        self.sick: list[EmbedderSick] = []
        self.sent_again: list[Delivery] = []
        publisher: Any = SimpleNamespace(publish_all=self._publish_all)
        letters: Any = SimpleNamespace()
        self.app: Any = SimpleNamespace()
        self.breaks_by: BaseException | None = None
        self.pipeline = Pipeline(
            decider or Decider(MemoryLedger(), Policy(), None, max_attempts=5),
            Settling(self.app, publisher, letters, Limits(), Observer(()), DeliverySpans(NO_RECORDER, {}, str)),
            self.hands,
            batch_size=8,
            hold_s=hold_s,
            send_again=self._send_again,
            on_sick=self.sick.append,
        )

    def take(self) -> Delivery:
        """Take a submission in hand."""
        (payload,) = fresh_samples(1)
        delivery = Delivery(message(), 0)
        delivery.trace = decode_trace(payload, Limits())
        self.pipeline.put(delivery)
        return delivery

    def take_to_bury(self, bury: Callable[[], Decision | None]) -> Delivery:
        """Take in hand what is no submission."""
        delivery = Delivery(message(), 0)
        delivery.burial = Burial(bury, dead_result("", "invalid", "it is none"))
        self.pipeline.put(delivery)
        return delivery

    def _publish_all(self, publications: Sequence[Publication]) -> list[ScorerError | None]:
        self.tries += bool(publications)
        if self.breaks_by and publications:
            raise self.breaks_by
        if self.is_away.is_set():
            return [AWAY] * len(publications)
        self.published += [decision.trace_id for decision, _ in publications]
        return [None] * len(publications)

    def _send_again(self, delivery: Delivery) -> None:
        self.sent_again.append(delivery)
        if len(self.sent_again) == 1:
            raise AWAY


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.is_away.clear()
    made.pipeline.stop()


def message() -> Any:
    """A message as it comes from kombu, that nobody waits for the result of."""
    return Message(channel=SimpleNamespace(), delivery_tag="1", headers={})


def raising(error: BaseException) -> Callable[[], Decision | None]:
    def fail() -> Decision | None:
        raise error

    return fail


def test_what_is_decided_is_published_and_acknowledged(scene: Scene) -> None:
    deliveries = [scene.take() for _ in range(20)]
    wait_until(lambda: len(scene.hands.ended) == 20, PATIENCE_S)
    assert scene.hands.ended == deliveries
    assert scene.published == [delivery.trace.id for delivery in deliveries if delivery.trace]
    assert scene.pipeline.longest_still_s() == 0


def test_what_has_waited_together_is_acknowledged_together(scene: Scene) -> None:
    scene.is_away.set()
    deliveries = [scene.take() for _ in range(5)]
    wait_until(lambda: all(delivery.waits_for for delivery in deliveries), PATIENCE_S)
    scene.is_away.clear()
    wait_until(lambda: len(scene.hands.ended) == 5, PATIENCE_S)
    assert set(scene.hands.ended) == set(deliveries)
    # Some may have been tried just then, while others had only begun to wait.
    assert len(scene.hands.acknowledged) <= 2


def test_what_cannot_be_published_waits_in_hand_and_is_decided_once(scene: Scene) -> None:
    scene.is_away.set()
    delivery = scene.take()
    wait_until(lambda: scene.tries >= 2, PATIENCE_S)
    assert (scene.hands.ended, scene.hands.given_back) == ([], [])
    decision = delivery.decision
    scene.is_away.clear()
    wait_until(lambda: scene.hands.ended, PATIENCE_S)
    assert delivery.decision is decision
    assert decision
    assert scene.published == [decision.trace_id]


def test_what_is_buried_is_acknowledged(scene: Scene) -> None:
    buried: list[bool] = []
    delivery = scene.take_to_bury(lambda: buried.append(True))
    wait_until(lambda: scene.hands.ended == [delivery], PATIENCE_S)
    assert buried == [True]


def test_what_waits_for_the_store_does_not_make_others_wait_for_it_in_turn(scene: Scene) -> None:
    tries: list[int] = []

    def bury(number: int) -> Callable[[], Decision | None]:
        def fail() -> Decision | None:
            tries.append(number)
            time.sleep(0.2)
            raise ServiceUnavailable("redis: away")

        return fail

    held = [scene.take_to_bury(bury(number)) for number in range(20)]
    decided = scene.take()
    wait_until(lambda: scene.hands.ended == [decided], PATIENCE_S)
    assert len(tries) < len(held)
    scene.pipeline.hurry()
    wait_until(lambda: set(scene.hands.given_back) == set(held), PATIENCE_S)


@pytest.mark.parametrize("error", [ValueError("our fault"), MemoryError(), NativePanicError(), SystemExit()])
def test_what_fails_by_our_fault_is_given_back_and_the_pipeline_goes_on(scene: Scene, error: BaseException) -> None:
    began = time.monotonic()
    failed = scene.take_to_bury(raising(error))
    wait_until(lambda: scene.hands.given_back == [failed], PATIENCE_S)
    assert time.monotonic() - began > 0.5, "it would come again at once, again and again"
    other = scene.take()
    wait_until(lambda: scene.hands.ended == [other], PATIENCE_S)


def test_what_waits_is_given_back_as_soon_as_the_worker_is_to_end(scene: Scene) -> None:
    scene.is_away.set()
    waits = scene.take()
    wait_until(lambda: scene.tries, PATIENCE_S)
    scene.pipeline.hurry()
    wait_until(lambda: scene.hands.given_back == [waits], PATIENCE_S)
    comes_later = scene.take()
    wait_until(lambda: scene.hands.given_back == [waits, comes_later], PATIENCE_S)
    scene.pipeline.wait_until_empty()


def test_what_has_gone_with_its_connection_waits_no_longer(scene: Scene) -> None:
    scene.is_away.set()
    lost = scene.take()
    wait_until(lambda: scene.tries, PATIENCE_S)
    scene.hands.connection = 1
    wait_until(lambda: scene.hands.given_back == [lost], PATIENCE_S)


def test_a_sick_embedder_gives_back_what_it_cannot_do() -> None:
    def prepare(*_: object, **__: object) -> None:
        raise EmbedderSick("no vectors")

    sick: Any = SimpleNamespace(prepare=prepare, refresh=lambda: None)
    scene = Scene(decider=sick)
    delivery = scene.take()
    wait_until(lambda: scene.hands.given_back == [delivery], PATIENCE_S)
    assert [str(error) for error in scene.sick] == ["no vectors"]
    scene.pipeline.stop()


def test_what_is_held_for_too_long_is_sent_again() -> None:
    scene = Scene(hold_s=0.5)
    scene.is_away.set()
    delivery = scene.take()
    wait_until(lambda: len(scene.sent_again) == 2, PATIENCE_S)
    wait_until(lambda: scene.hands.ended == [delivery], PATIENCE_S)
    assert scene.published == []
    scene.pipeline.stop()


def test_a_message_in_hand_ages_until_something_is_tried_with_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.is_away.set()
    scene.take()
    wait_until(lambda: scene.tries, PATIENCE_S)
    now = [time.monotonic() + 500]
    monkeypatch.setattr("kp_scorer.process.watchdog.time", SimpleNamespace(monotonic=lambda: now[0]))
    tries = scene.tries
    wait_until(lambda: scene.tries > tries, PATIENCE_S)
    wait_until(lambda: scene.pipeline.longest_still_s() == 0, PATIENCE_S)
    now[0] += 400
    assert scene.pipeline.longest_still_s() == pytest.approx(400)
    monkeypatch.undo()


def test_results_that_cannot_be_stored_keep_nothing_waiting(scene: Scene) -> None:
    tries: list[str] = []

    def store_result(task_id: str, *_: object) -> None:
        tries.append(task_id)
        raise OSError("away")

    scene.app.backend = SimpleNamespace(store_result=store_result)
    scene.is_away.set()
    deliveries = [scene.take() for _ in range(5)]
    for delivery in deliveries:
        delivery.message.headers = {"id": str(uuid.uuid4()), "ignore_result": False}
    wait_until(lambda: all(delivery.waits_for for delivery in deliveries), PATIENCE_S)
    scene.is_away.clear()
    wait_until(lambda: len(scene.hands.ended) == 5, PATIENCE_S)
    # One for each time that some were published.
    assert len(tries) == len(scene.hands.acknowledged) < 5


@pytest.mark.parametrize("error", [MemoryError(), NativePanicError()])
def test_an_error_in_publishing_gives_back_and_the_pipeline_goes_on(scene: Scene, error: BaseException) -> None:
    scene.breaks_by = error
    failed = scene.take()
    wait_until(lambda: scene.hands.given_back == [failed], PATIENCE_S)
    scene.breaks_by = None
    other = scene.take()
    wait_until(lambda: scene.hands.ended == [other], PATIENCE_S)


def test_waiting_to_be_decided_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class Slow(Decider):
        def prepare(self, *args: Any, **options: Any) -> Any:
            assert gate.wait(PATIENCE_S)
            return super().prepare(*args, **options)

    scene = Scene(decider=Slow(MemoryLedger(), Policy(), None, max_attempts=5))
    deliveries = [scene.take() for _ in range(20)]
    now = time.monotonic() + 500
    monkeypatch.setattr("kp_scorer.process.watchdog.time", SimpleNamespace(monotonic=lambda: now))
    assert scene.pipeline.longest_still_s() == 0
    assert scene.pipeline.deciding_s() >= 400
    monkeypatch.undo()
    gate.set()
    wait_until(lambda: len(scene.hands.ended) == len(deliveries), PATIENCE_S)
    scene.pipeline.stop()


@pytest.fixture
def request_of() -> Iterator[Callable[[dict[str, Any]], SubmissionRequest]]:
    """Makes Celery's request of a payload, reserved as a worker does it."""
    app: Any = SimpleNamespace(
        tasks={TASK_NAME: SimpleNamespace(ignore_result=True, acks_late=True)}, conf=SimpleNamespace(timezone=None)
    )

    def make(payload: dict[str, Any]) -> SubmissionRequest:
        task_message = TaskMessage(message(), "id", [payload], {})
        request = SubmissionRequest(task_message, app=app, body=([payload], {}, {}), decoded=True)
        state.task_reserved(request)
        return request

    yield make
    state.reset_state()


@pytest.mark.parametrize("end", [Delivery.end, Delivery.let_go])
def test_celery_remembers_no_message_that_was_let_go_of(
    request_of: Callable[[dict[str, Any]], SubmissionRequest], end: Callable[[Delivery], None]
) -> None:
    request = request_of({})
    delivery = Delivery(message(), 0, request)
    assert list(state.active_requests) == [request]
    end(delivery)
    assert (list(state.active_requests), list(state.reserved_requests), state.requests) == ([], [], {})
    assert request.acknowledged, "Celery would acknowledge it once more"


def test_monitors_are_never_shown_the_trace(request_of: Callable[[dict[str, Any]], SubmissionRequest]) -> None:
    (payload,) = fresh_samples(1)
    assert payload["task"]["objective"] not in repr(request_of(payload).info())
