"""The client for coroutines, in any event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, aclosing, closing, suppress
from functools import partial

from kp_scorer.client.base import LOOK_UP_TOO_LATE, SUBMIT_TOO_LATE, BaseClient, Submitted, Trace, id_or_raise
from kp_scorer.client.io_thread import Result
from kp_scorer.client.waiting import LEAST_S, Deadline, Polling, Status, decision_of
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable


class AsyncClient(BaseClient, AbstractAsyncContextManager["AsyncClient"]):
    """Does what ``Client`` does, for coroutines. Its methods raise the same errors.

    Any number of tasks may share it, in any event loop: one thread talks to the servers for all of them. Their calls take
    turns, so submit a thousand traces by one ``submit_many``, not by a thousand tasks. Do not change a trace before its
    submission has been awaited. A cancelled call may have submitted the trace all the same.

        async with AsyncClient.connect("redis://queue:6379/0") as client:
            trace_id = await client.submit(trace)
            decision = await client.wait(trace_id, timeout_s=30)
    """

    async def submit(self, trace: Trace, timeout_s: float | None = None) -> str:
        """Put a trace on the queue and return its id, as ``Client.submit`` does."""
        return id_or_raise(await self.submit_many([trace], timeout_s))

    async def submit_many(self, traces: Iterable[Trace], timeout_s: float | None = None) -> list[Submitted]:
        """Put traces on the queue, as ``Client.submit_many`` does. The traces are iterated in the event loop."""
        deadline = Deadline(timeout_s, self._timeout_s, SUBMIT_TOO_LATE)
        # The I/O thread also checks the traces: the largest one would block the loop for some 40 ms.
        with closing(self._queued(traces, lambda batch: lambda: self._send(self._checked_each(batch)))) as answers:
            return [answer for future in answers for answer in await _await(future, deadline)]

    async def look_up(self, trace_ids: Sequence[str], timeout_s: float | None = None) -> list[Status | None]:
        """Return the status of each trace, in order, in one round trip; None if it is unknown or its record has expired."""
        return await self._do(lambda: self._look_up(trace_ids), timeout_s, LOOK_UP_TOO_LATE)

    async def submit_outcome(
        self,
        trace_id: str,
        *,
        success: bool,
        confidence: float | None = None,
        reason: str | None = None,
        outcome_id: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Submit a late outcome of a trace, and return the outcome's id, as ``Client.submit_outcome`` does."""
        make = partial(self._late_outcome, trace_id, success=success, confidence=confidence, reason=reason, id=outcome_id)
        return await self.submit(await self._do(make, timeout_s, SUBMIT_TOO_LATE), timeout_s)

    async def wait(self, trace_id: str, timeout_s: float) -> Decision:
        """Wait for a trace's decision."""
        async with aclosing(self.as_completed([trace_id], timeout_s)) as completed:
            status = await anext(completed, None)
        # The trace may have completed after the last look-up, or never have been submitted.
        return decision_of(trace_id, status or (await self.look_up([trace_id], LEAST_S))[0], timeout_s)

    async def as_completed(self, trace_ids: Iterable[str], timeout_s: float) -> AsyncGenerator[Status, None]:
        """Yield each trace's status as soon as it is decided or dead; end when all are, or when the time is up."""
        polling = Polling(trace_ids, timeout_s, self._timeout_s)
        while polling.pending:
            for status in polling.update(await self.look_up(polling.pending, polling.look_up_s())):
                yield status
            if polling.is_over():
                return
            await asyncio.sleep(polling.pause_s)

    async def close(self) -> None:
        """Close the connections; those to a server that does not answer are abandoned after ``broker.timeout_s``."""
        try:
            with suppress(ServiceUnavailable):
                await self._do(self._close)
        finally:
            self._io.stop()

    async def _do(self, call: Callable[[], Result], timeout_s: float | None = None, too_late: str = "") -> Result:
        return await _await(self._io.submit(call), Deadline(timeout_s, self._timeout_s, too_late))

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _await(future: "Future[Result]", deadline: Deadline) -> Result:
    try:
        async with asyncio.timeout(deadline.left_s()):
            # If the caller is cancelled, so is the future, and a call that has not started never does.
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise deadline.error from None
