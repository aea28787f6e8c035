"""Runs without hypothesis, for many steps a second: drawn from a seed, and cut down by itself when one fails."""

from collections import Counter
from collections.abc import Iterator, Sequence
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
    told: list[str]
    violation: str

    def __str__(self) -> str:
        return f"seed {self.seed}\n{describe(self.steps, self.told)}\n{self.violation}"


@contextmanager
def world_in(server: Server) -> Iterator[World]:
    """A new world."""
    world = World(server)
    try:
        yield world
    finally:
        world.close()


def run(server: Server, seed: int, length: int, executed: Counter[str], cells: Counter[str]) -> Failure | None:
    """Do ``length`` steps and end everything; count the steps by name, and the cells of the table."""
    chance, steps, told = Chance(seed), list[Step](), list[str]()
    with world_in(server) as world:
        try:
            for _ in range(length):
                steps.append(chance.next(world))
                executed[steps[-1].name] += 1
                told.append("")
                told[-1] = perform(world, steps[-1])
            drain(world)
        except Violation as violation:
            return Failure(seed, steps, told, str(violation))
        finally:
            cells += world.model.cells
    return None


def repeat(server: Server, seed: int, steps: Sequence[Step]) -> Failure | None:
    """Do these steps, as far as they are possible, and end everything."""
    done, told = list[Step](), list[str]()
    with world_in(server) as world:
        try:
            for step in steps:
                done.append(step)
                told.append("")
                told[-1] = perform(world, step)
            drain(world)
        except Violation as violation:
            return Failure(seed, done, told, str(violation))
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
