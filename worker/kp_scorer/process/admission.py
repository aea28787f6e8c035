"""Admits deliveries to the stages that decide: a bounded group at a time, and one delivery alone after a failure."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.process.delivery import Delivery
from kp_scorer.reviser import Revised

Sink = Callable[[Sequence[Delivery]], None]  # Passes deliveries on to the next stage; does not raise.


class FairQueue:
    """The deliveries that wait, in the order of their turns. Queues take turns by weight, however much waits in each.

    This is start-time fair queueing (Goyal, Vin, Cheng: 1996). A queue that was idle begins at the present turn, less a small
    ``credit`` of turns, because a busy queue, too, may have nothing here for a moment. The deliveries of a single queue keep
    their order.
    """

    def __init__(self, weights: Mapping[str, int], credit: int) -> None:
        self._weights = weights
        self._credit = credit
        self._next_turns: dict[str, float] = {}
        self._turn = 0.0
        self._numbers = count()
        self._waiting: list[tuple[float, int, Delivery]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delivery: Delivery) -> None:
        """Queue a delivery, and set its turn."""
        queue = delivery.queue
        delivery.turn = max(self._turn - self._credit, self._next_turns.get(queue, 0.0))
        self._next_turns[queue] = delivery.turn + 1 / self._weights.get(queue, 1)
        heappush(self._waiting, (delivery.turn, next(self._numbers), delivery))

    def get(self) -> Delivery:
        """Remove the delivery whose turn it is, and return it."""
        self._turn, _, delivery = heappop(self._waiting)
        return delivery


class Admission:
    """Admits deliveries to the stages that decide. They return each one, either resolved or to be decided again.

    Isolation: deliveries that fail together are decided again, each while no other is being decided, so that a trace that
    causes a failure fails alone. An outage is no trace's fault, so its error resolves all of them. At most two groups are being
    decided, as each of these traces is charged with an attempt if the worker dies.
    """

    def __init__(
        self,
        group_size: int,
        on_resolved: Callable[[Sequence[tuple[Delivery, Revised | Exception]]], None],
        weights: Mapping[str, int],
    ) -> None:
        """Prepare to admit groups of up to ``group_size`` deliveries; ``on_resolved`` gets the resolved ones.

        ``on_resolved`` must neither raise nor wait. Queues take turns by their ``weights``.
        """
        self._group_size = group_size
        self._on_resolved = on_resolved
        self._changed = threading.Condition()
        self._waiting = FairQueue(weights, credit=group_size)
        self._alone: deque[Delivery] = deque()
        self._deciding = 0
        self._is_one_alone = False
        self._is_stopping = False
        self.is_aborted = False  # Once it is set, the stages begin no more work.

    def submit(self, delivery: Delivery) -> None:
        """Queue a delivery whose trace is to be decided. Any thread may do so."""
        with self._changed:
            self._waiting.put(delivery)
            self._changed.notify()

    def next_group(self) -> Sequence[Delivery]:
        """Wait for the next group and return it; return an empty one after ``stop`` once all are resolved."""
        with self._changed:
            # Even after stop(), a trace that is being decided may have to be decided again.
            self._changed.wait_for(
                lambda: self._can_admit() or (self._is_stopping and not (self._waiting or self._alone or self._deciding))
            )
            if not self._can_admit():
                return ()
            self._is_one_alone = bool(self._alone)
            if self._is_one_alone:
                group = [self._alone.popleft()]
            else:
                group = [self._waiting.get() for _ in range(min(self._group_size, len(self._waiting)))]
            for delivery in group:
                delivery.is_alone = self._is_one_alone
            self._deciding += len(group)
            return group

    def resolve(self, ends: Sequence[tuple[Delivery, Revised | Exception | None]]) -> None:
        """Pass each delivery on to ``on_resolved``, with the decision or the error that resolves its trace.

        Those with None are decided again instead, each while no other is being decided.
        """
        resolved = [(delivery, end) for delivery, end in ends if end is not None]
        with self._changed:
            self._alone.extend(delivery for delivery, end in ends if end is None)
            self._deciding -= len(ends)
            self._changed.notify()
        if resolved:
            self._on_resolved(resolved)

    def fail(self, deliveries: Sequence[Delivery], error: Exception) -> None:
        """Resolve by an error those that failed alone, or by an outage or a wrong setting; decide others again, each alone."""
        is_final = isinstance(error, ServiceUnavailable | SettingsError) or all(delivery.is_alone for delivery in deliveries)
        self.resolve([(delivery, error if is_final else None) for delivery in deliveries])

    def raise_if_aborted(self) -> None:
        """After an abort, raise ServiceUnavailable; this requeues the deliveries that a stage was about to begin."""
        if self.is_aborted:
            raise ServiceUnavailable("worker: about to end")

    def stop(self) -> None:
        """Make ``next_group`` return an empty group once everything submitted is resolved."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def _can_admit(self) -> bool:
        if self._alone:
            return not self._deciding
        return bool(self._waiting) and self._deciding <= self._group_size and not (self._is_one_alone and self._deciding)
