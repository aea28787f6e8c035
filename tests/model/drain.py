"""The end of a run: everybody ends what was begun, in good order, and nothing may be left over."""

from typing import Final

from tests.model.baton import Violation
from tests.model.records import TRACE_LEASE_MS
from tests.model.workers import Worker
from tests.model.world import World

_ROUNDS: Final = 60


def drain(world: World) -> None:
    """Work everything off, while time goes on and no worker stalls; raise a violation if that never ends."""
    for _ in range(_ROUNDS):
        _work_off(world)
        is_in_flight = any(worker.in_flight for worker in world.workers)
        if not (world.queue or world.operators or world.model.pending or is_in_flight):
            world.audit()
            return
        if not is_in_flight:
            world.reconcile(0, 0)
        world.move(TRACE_LEASE_MS + 1, stalled=0)
    unended = [message.payload.header_id for worker in world.workers for message in worker.in_flight]
    raise Violation(f"never ends: pending {sorted(world.model.pending)}, in flight {unended}")


def _work_off(world: World) -> None:
    while world.operators:
        world.go_on(0, 0)
        world.check()
    for worker in world.workers:
        while world.queue:
            worker.take(world.queue.pop(0))
        _end_all(world, worker)


def _end_all(world: World, worker: Worker) -> None:
    # Those whose traces others hold wait again, for the next round.
    unseen = len(worker.waiting)
    while worker.alone or (unseen > 0 and worker.waiting) or worker.can_finish() or worker.ended:
        if worker.can_finish():
            worker.finish(fails=False)
        elif worker.ended:
            worker.end(0)
        else:
            unseen -= 0 if worker.alone else 3
            worker.begin(3, embedding_fails=False)
        world.check()
