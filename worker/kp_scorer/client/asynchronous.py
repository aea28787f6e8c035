"""The client for asyncio: the verbs of :class:`~kp_scorer.client.Client`, of which none holds the event loop up.

async with AsyncClient.connect() as client:
    trace_id = await client.submit(trace)
    decision = await client.wait(trace_id, timeout_s=30)
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from itertools import chain
from typing import Self, TypeVar

from kp_scorer.client.base import (
    LOOKED_UP_TOO_LATE,
    MANY_TOO_LATE,
    TOO_LATE,
    ClientBase,
    Patience,
    Submitted,
    Trace,
    hundreds,
    submitted,
)
from kp_scorer.client.settling import LEAST_S, Status, Unsettled, decision_of
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable

Found = TypeVar("Found")


class AsyncClient(ClientBase):
    """Submits traces and reads what became of them, as :class:`~kp_scorer.client.Client` does, for coroutines.

    Any number of tasks may use it at once, in any event loop: one thread talks to the servers for all of them, and no other
    waits. What they call takes turns, so that a thousand traces at once are for :meth:`submit_many`, not for a thousand tasks.
    Leave a trace as it is until its submission is awaited. A call that is cancelled may have submitted all the same.
    """

    async def submit(self, trace: Trace, timeout_s: float | None = None) -> str:
        """Put a trace on the queue and return its id; see :meth:`Client.submit <kp_scorer.client.Client.submit>`.

        Raises:
            InvalidTrace: it is not a ReasoningTrace, or over a limit; nothing was sent.
            TraceConflict: its id was submitted before with other content; nothing was sent.
            SettingsError: the queues have to be declared, and RabbitMQ has one of this name with other arguments.
            ServiceUnavailable: the broker or Redis cannot be reached, is full, or did not answer in time; or RabbitMQ has no
                queue yet, and this user may not make it. Submit it again, which is always safe.
        """
        # Checked by the thread too: the largest one would hold the loop up for some 40 ms.
        (answer,) = await self._do(lambda: self._send([self._noted(trace)]), timeout_s, TOO_LATE)
        return submitted(answer)

    async def submit_many(self, traces: Iterable[Trace], timeout_s: float | None = None) -> list[Submitted]:
        """Put traces on the queue, a hundred in one step; see :meth:`Client.submit_many <kp_scorer.client.Client.submit_many>`.

        The traces are taken in the event loop.

        Raises:
            SettingsError: as :meth:`submit`.
            ServiceUnavailable: as :meth:`submit`. Some may be submitted; submit all of them again, which is always safe.
        """
        patience = Patience(timeout_s, self._timeout_s)
        answers: list[list[Submitted]] = []
        begun: Future[list[Submitted]] | None = None
        try:
            for some in hundreds(traces):
                # By another thread, so that the next hundred is checked while the one before is on its way.
                noted = await _within(patience, asyncio.to_thread(self._noted_each, some), MANY_TOO_LATE)
                if begun:
                    answers.append(await _result(begun, patience, MANY_TOO_LATE))
                begun = self._errands.begin(partial(self._send, noted))
            if begun:
                answers.append(await _result(begun, patience, MANY_TOO_LATE))
        finally:
            # The traces may come to an error of their own.
            if begun:
                begun.cancel()
        return list(chain.from_iterable(answers))

    async def look_up(self, trace_ids: Sequence[str], timeout_s: float | None = None) -> list[Status | None]:
        """Return the status of each trace, in order, in one round trip; None if it is unknown or its record has expired.

        Args:
            trace_ids: the traces.
            timeout_s: how long to wait for Redis; by default ``broker.submit_timeout_s``.

        Raises:
            ServiceUnavailable: Redis cannot be reached, or did not answer in time.
        """
        return await self._do(lambda: self._look_up(trace_ids), timeout_s, LOOKED_UP_TOO_LATE)

    async def wait(self, trace_id: str, timeout_s: float) -> Decision:
        """Wait for a trace's decision.

        Raises:
            DecisionTimeout: none came in time; it says whether the trace is known at all.
            TraceDead: none will come.
            ServiceUnavailable: Redis cannot be reached.
        """
        async with aclosing(self.as_settled([trace_id], timeout_s)) as settled:
            status = await anext(settled, None)
        # It may have ended after the last look, or have never been submitted.
        return decision_of(trace_id, status or (await self.look_up([trace_id], LEAST_S))[0], timeout_s)

    async def as_settled(self, trace_ids: Iterable[str], timeout_s: float) -> AsyncGenerator[Status, None]:
        """Yield each trace's status as soon as it is decided or dead; end when all are, or when the time is up.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        unsettled = Unsettled(trace_ids, timeout_s, self._timeout_s)
        while unsettled.trace_ids:
            for status in unsettled.settle(await self.look_up(unsettled.trace_ids, unsettled.look_up_s())):
                yield status
            if unsettled.is_over():
                return
            await asyncio.sleep(unsettled.pause_s)

    async def close(self) -> None:
        """Close the connections; those of a silent server are left behind after ``broker.submit_timeout_s``."""
        try:
            with suppress(ServiceUnavailable):
                await self._do(self._close)
        finally:
            self._errands.end()

    async def _do(self, errand: Callable[[], Found], timeout_s: float | None = None, too_late: str = "") -> Found:
        return await _result(self._errands.begin(errand), Patience(timeout_s, self._timeout_s), too_late)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _result(errand: "Future[Found]", patience: Patience, too_late: str) -> Found:
    """Give what an errand returns, or raise what it raises, or ServiceUnavailable if it has not ended in time."""
    # Cancelled with what waits for it, an errand that was not begun never is.
    return await _within(patience, asyncio.wrap_future(errand), too_late)


async def _within(patience: Patience, awaited: Awaitable[Found], too_late: str) -> Found:
    try:
        async with asyncio.timeout(patience.left_s()):
            return await awaited
    except TimeoutError:
        raise ServiceUnavailable(too_late.format(patience.limit_s)) from None
