"""Runs of many steps, drawn from a seed, and cut down when one fails."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tests.model.actions import Chance, Step, describe, perform
from tests.model.baton import Violation
from tests.model.drain import drain
from tests.model.operators import patched_broker
from tests.model.patched_scripts import Mutant, patched_scripts
from tests.model.server import Server
from tests.model.world import World


class Failure(NamedTuple):
    """A run that found something."""

    seed: int
    steps: list[Step]
    notes: list[str]
    violation: str

    def __str__(self) -> str:
        return f"seed {self.seed}\n{describe(self.steps, self.notes)}\n{self.violation}"


def run(server: Server, seed: int, length: int, executed: Counter[str]) -> Failure | None:
    """Do ``length`` steps and end everything; count the steps by name."""
    return _perform(server, seed, length, Chance(seed).next, executed)


def repeat(server: Server, seed: int, steps: Sequence[Step]) -> Failure | None:
    """Do these steps, as far as they are possible, and end everything."""
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


def cut_down(server: Server, failure: Failure) -> Failure:
    """Leave out steps for as long as what remains fails, and of the same."""
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
        # Once more, until no single step can be spared.
        size = size // 2 if size > 1 or len(failure.steps) == length else 1
        length = len(failure.steps)
    return failure


@contextmanager
def prepared(mutant: Mutant | None = None) -> Iterator[None]:
    """The scripts under the test's clock, and a broker that is the world's queue."""
    with patched_scripts(mutant), patched_broker():
        yield
