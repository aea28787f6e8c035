"""Runs of many steps, drawn from a seed, which are cut down to fewer steps if they fail."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from tests.model.actions import Chance, Step, perform
from tests.model.baton import Violation
from tests.model.operators import patched_broker
from tests.model.patched_scripts import Mutant, patched_scripts
from tests.model.records import RECORD_TTL_MS, TRACE_LEASE_MS
from tests.model.server import Server
from tests.model.workers import Worker
from tests.model.world import World

_ROUNDS: Final = 60
"""The number of rounds within which all work must be finished. Nothing may be left over after them."""


class Failure(NamedTuple):
    seed: int
    steps: list[Step]
    notes: list[str]
    violation: str

    def __str__(self) -> str:
        """Return the steps of the run, one on each line, and the violation."""
        width = len(str(len(self.steps)))
        steps = enumerate(zip(self.steps, self.notes, strict=True), 1)
        lines = [f"{number:{width}} {step.name}({step.first}, {step.second})  {note}" for number, (step, note) in steps]
        return "\n".join([f"seed {self.seed}", *lines, self.violation])


def run(server: Server, seed: int, length: int, executed: Counter[str]) -> Failure | None:
    """Run ``length`` random steps, then finish all work; count the steps by name in ``executed``."""
    return _perform(server, seed, length, Chance(seed).next, executed)


def repeat(server: Server, seed: int, steps: Sequence[Step]) -> Failure | None:
    """Repeat these steps, leaving out those that are not possible, and then finish all work."""
    remaining = iter(steps)
    return _perform(server, seed, len(steps), lambda _: next(remaining), Counter())


def _perform(server: Server, seed: int, length: int, choose: Callable[[World], Step], executed: Counter[str]) -> Failure | None:
    steps, notes = list[Step](), list[str]()
    world = World(server)
    try:
        for _ in range(length):
            steps.append(choose(world))
            executed[steps[-1].name] += 1
            notes.append("")
            notes[-1] = perform(world, steps[-1])
        drain(world)
    except Violation as violation:
        return Failure(seed, steps, notes, str(violation))
    finally:
        world.close()
    return None


def drain(world: World) -> None:
    """Finish all work, while time goes on and no worker stalls; raise a violation if that never ends."""
    for _ in range(_ROUNDS):
        _work_off(world)
        is_in_flight = any(worker.in_flight for worker in world.workers)
        if not (world.queue or world.operators or world.model.pending or is_in_flight):
            world.audit()
            return
        if not is_in_flight:
            world.resend_lost(0, 0)
        # If only late outcomes are left, wait for as long as they are kept.
        are_early = not is_in_flight and all(world.model.record(each).revises for each in world.model.pending)
        world.move(RECORD_TTL_MS + 1 if are_early else TRACE_LEASE_MS + 1, stalled=0)
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
    # Some messages wait again, because other workers hold their traces. Leave those for the next round.
    unseen = len(worker.waiting)
    unheld = len(worker.late)
    while True:
        if worker.late_alone or worker.revising or (unheld > 0 and worker.late):
            unheld -= not (worker.late_alone or worker.revising)
            worker.revise(1, fails=False)
        elif worker.can_finish():
            worker.finish(fails=False)
        elif worker.ended:
            worker.end(0)
        elif worker.alone or (unseen > 0 and worker.waiting):
            unseen -= 0 if worker.alone else 3
            worker.begin(3, embedding_fails=False)
        else:
            return
        world.check()


def cut_down(server: Server, failure: Failure) -> Failure:
    """Leave out steps as long as the others still fail with the same kind of violation."""
    length = len(failure.steps)
    size = length // 2
    while size:
        start = 0
        while start < len(failure.steps):
            shorter = repeat(server, failure.seed, failure.steps[:start] + failure.steps[start + size :])
            if shorter and shorter.violation.split()[0] == failure.violation.split()[0]:
                failure = shorter
            else:
                start += size
        # Repeat single steps until none can be left out any more.
        size = size // 2 if size > 1 or len(failure.steps) == length else 1
        length = len(failure.steps)
    return failure


@contextmanager
def prepared(mutant: Mutant | None = None) -> Iterator[None]:
    """Run the block with scripts under the test's clock, and with the world's queue as the broker."""
    with patched_scripts(mutant), patched_broker():
        yield
