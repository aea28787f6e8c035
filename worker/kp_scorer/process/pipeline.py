"""All that a worker has in hand, on its way through three stages with a thread each: prepared, finished, settled."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import structlog

from kp_scorer.decider import Prepared, Settled
from kp_scorer.errors import EmbedderSick, ScorerError, ServiceUnavailable, SettingsError
from kp_scorer.logs import raised_at
from kp_scorer.process.batcher import MicroBatcher, Stages
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.settling import Settling
from kp_scorer.process.stages import NotedBatch, NotedStages
from kp_scorer.process.watchdog import StallTimer, VitalThread
from kp_scorer.trace import ReasoningTrace

PAUSE_S: Final = 1.0
"""How long what cannot be done waits before it is tried again."""

log = structlog.get_logger("kp_scorer.process.pipeline")

_Handed = tuple[Delivery, Settled | Exception | None]


class Hands(Protocol):
    """Who took the messages, and lets go of them. Any thread may call it."""

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Let go of messages for good, as far as they have not gone with their connection."""
        ...

    def give_back(self, delivery: Delivery) -> None:
        """Have a message delivered again, if it does not come again by itself since its connection is gone."""
        ...

    def has_lost(self, delivery: Delivery) -> bool:
        """Whether the message is gone with its connection, and comes again by itself."""
        ...


class Pipeline:
    """Takes messages in hand and ends each: as a decision that is published, a dead letter, or a message given back.

    What cannot be done for the moment waits in hand, so that no more is taken, and no delivery is used up for an outage.
    """

    def __init__(
        self,
        stages: Stages[ReasoningTrace, Prepared, Settled],
        settling: Settling,
        hands: Hands,
        *,
        batch_size: int,
        hold_s: float = math.inf,
        send_again: Callable[[Delivery], None],
        on_sick: Callable[[EmbedderSick], None],
    ) -> None:
        """Start the threads.

        Args:
            stages: decide traces.
            settling: ends what is decided, or cannot be.
            hands: lets go of messages.
            batch_size: how many traces are decided together at most.
            hold_s: for how many seconds a message that cannot be finished stays in hand.
            send_again: puts the message of one that was held for longer at the end of its queue.
            on_sick: called when the embedder fails whatever it is given.
        """
        self._settling = settling
        self._hands = hands
        self._hold_s = hold_s
        self._send_again = send_again
        self._on_sick = on_sick
        self._in_hand: set[Delivery] = set()
        self._emptied = threading.Condition()
        self._handed: SimpleQueue[Sequence[_Handed] | None] = SimpleQueue()
        self._waiting: list[Delivery] = []
        self._try_again_at = 0.0
        self._send_again_from = 0.0
        self._stopping = False
        self._stopped = False
        self._settling_for = StallTimer()
        self._batcher: MicroBatcher[Delivery, NotedBatch, Settled] = MicroBatcher(
            NotedStages(stages), self._handed.put, batch_size
        )
        settler = VitalThread(self._settle_all, "settler")
        self.threads = (*self._batcher.threads, settler)
        """Without any of them, what is taken in hand stays there for good."""
        settler.start()

    def put(self, delivery: Delivery) -> None:
        """Take a message in hand."""
        self._in_hand.add(delivery)
        if delivery.trace and delivery.is_undecided:
            self._decide(delivery)
        else:
            self._handed.put([(delivery, None)])

    @property
    def in_hand(self) -> int:
        """How many messages are in hand."""
        return len(self._in_hand)

    def deciding_s(self) -> float:
        """Seconds that a batch has been in one of the two stages that decide."""
        return self._batcher.still_s()

    def longest_still_s(self) -> float:
        """Seconds that nothing was done with the message in hand with which nothing was done for the longest.

        Those that are being decided do not count; see :meth:`deciding_s`.
        """
        # Copied, as other threads add and remove meanwhile.
        still_s = max((delivery.still.elapsed_s() for delivery in tuple(self._in_hand)), default=0.0)
        return max(still_s, self._settling_for.elapsed_s())

    def hurry(self) -> None:
        """Give back what waits, and what would have to wait from now on."""
        self._stopping = True
        self._handed.put(None)

    def give_up(self) -> None:
        """Give back what is not being decided yet, too."""
        self._batcher.give_up()

    def wait_until_empty(self) -> None:
        """Wait until nothing is in hand."""
        with self._emptied:
            self._emptied.wait_for(lambda: not self._in_hand)

    def stop(self) -> None:
        """Finish what is in hand, then end the threads."""
        self.hurry()
        self._batcher.stop()
        self.wait_until_empty()
        self._stopped = True
        self._handed.put(None)
        self.threads[-1].join()

    def _settle_all(self) -> None:
        while not self._stopped:
            handed = self._next()
            self._settling_for.start()
            self._settle(handed)
            self._settling_for.stop()

    def _next(self) -> Sequence[_Handed]:
        """Wait for what was handed over, or until what waits is to be tried again, which comes along with either."""
        due_s = max(0.0, self._try_again_at - time.monotonic()) if self._waiting else None
        handed: list[_Handed] = []
        with suppress(Empty):
            handed.extend(self._handed.get(timeout=due_s) or ())
            # What came meanwhile is published in the same round trip.
            while True:
                handed.extend(self._handed.get_nowait() or ())
        if self._stopping or time.monotonic() >= self._try_again_at:
            # Also what has not waited for all of the pause: most wait for the same thing.
            handed.extend((delivery, None) for delivery in self._waiting)
            self._waiting.clear()
        return handed

    def _settle(self, handed: Sequence[_Handed]) -> None:
        due = [delivery for delivery, settled in handed if self._is_due(delivery, settled)]
        errors = self._settling.end(due)
        for delivery, error in zip(due, errors, strict=True):
            if error is not None:
                self._wait(delivery, error)
        self._acknowledge([delivery for delivery, error in zip(due, errors, strict=True) if error is None])

    def _is_due(self, delivery: Delivery, settled: Settled | Exception | None) -> bool:
        """Whether a delivery is to be buried or published now. If not, it is seen to what else is to be done with it."""
        if settled is not None:
            return self._is_settled(delivery, settled)
        if delivery.waits_for and self._is_over(delivery):
            return False
        if delivery.is_undecided:
            self._decide(delivery)
            return False
        return True

    def _decide(self, delivery: Delivery) -> None:
        assert delivery.trace, "there is nothing else to be done with it"
        # However long it waits for its batch, that is no standstill as long as there are batches.
        delivery.still.stop()
        delivery.steps = []
        self._batcher.submit(delivery)

    def _is_settled(self, delivery: Delivery, settled: Settled | Exception) -> bool:
        delivery.still.start()
        try:
            self._settling.take(delivery, settled)
        except Exception as error:
            self._wait(delivery, error)
            return False
        return True

    def _is_over(self, delivery: Delivery) -> bool:
        """Whether a delivery that has waited is in hand no longer, as it has to wait no longer."""
        if delivery.is_hopeless or self._stopping or self._hands.has_lost(delivery):
            self._give_back(delivery)
            return True
        if delivery.held_s() <= self._hold_s or time.monotonic() < self._send_again_from:
            return False
        try:
            self._send_again(delivery)
        except (ServiceUnavailable, SettingsError):
            # It is still in hand, and due again. The others would wait for the broker as long as this one did.
            self._send_again_from = time.monotonic() + PAUSE_S
            return False
        except Exception as error:
            self._wait(delivery, error)
            return True
        log.info("message_sent_again", held_s=round(delivery.held_s()))
        self._acknowledge([delivery])
        return True

    def _wait(self, delivery: Delivery, error: BaseException) -> None:
        """Have a delivery wait, for what failed with this error."""
        if isinstance(error, EmbedderSick):
            self._on_sick(error)
            self._give_back(delivery)
            return
        if not isinstance(error, ScorerError):
            # It is neither decided nor a dead letter, so its message must not be lost. Given back, it comes again at once:
            # without the pause this would spin.
            log.error("message_given_back", detail=type(error).__name__, where=raised_at(error))
            delivery.is_hopeless = True
        waits_for = str(error) or type(error).__name__
        if waits_for != delivery.waits_for and not delivery.is_hopeless:
            log.warning("trace_waits" if delivery.trace else "message_waits", detail=waits_for)
        delivery.waits_for = waits_for
        delivery.still.start()
        if self._stopping:
            self._give_back(delivery)
        else:
            if not self._waiting:
                self._try_again_at = time.monotonic() + PAUSE_S
            self._waiting.append(delivery)

    def _acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            self._hands.acknowledge(deliveries)
            self._let_go(deliveries)

    def _give_back(self, delivery: Delivery) -> None:
        self._hands.give_back(delivery)
        self._let_go([delivery])

    def _let_go(self, deliveries: Sequence[Delivery]) -> None:
        with self._emptied:
            self._in_hand.difference_update(deliveries)
            self._emptied.notify_all()
