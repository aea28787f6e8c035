"""The actions that a run may take next, with their weights and conditions."""

from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

from tests.model.contents import IDS, KINDS
from tests.model.world import MOVES_MS, World

LARGEST_NUMBER: Final = len(MOVES_MS) - 1
_LONGEST_QUEUE: Final = 8
_MOST_OPERATORS: Final = 4
_RARE: Final = 4
_OFTEN: Final = 14


class Action(NamedTuple):
    """An action of the world, its weight among the others, and whether it is possible now."""

    do: Callable[[World, int, int], str]
    weight: int
    is_possible: Callable[[World], bool] = lambda _: True

    @property
    def name(self) -> str:
        return self.do.__name__


class Step(NamedTuple):
    name: str
    first: int
    second: int


def _has_room(world: World) -> bool:
    return len(world.queue) < _LONGEST_QUEUE


def _may_have_operators(world: World) -> bool:
    return len(world.operators) < _MOST_OPERATORS


def _can_begin(world: World) -> bool:
    return any(worker.can_begin() for worker in world.workers)


def _can_finish(world: World) -> bool:
    return any(worker.can_finish() for worker in world.workers)


ACTIONS: Final = {
    action.name: action
    for action in (
        Action(World.submit, 6, _may_have_operators),
        Action(World.send_foreign, 8, _has_room),
        Action(World.duplicate, 2, lambda world: bool(world.queue) and _has_room(world)),
        Action(World.take, 12, lambda world: bool(world.queue)),
        Action(World.take_strictly, 2, World.has_noted),
        Action(World.begin, 16, _can_begin),
        Action(World.begin_badly, 1, _can_begin),
        Action(World.finish, 24, _can_finish),
        Action(World.finish_badly, 1, _can_finish),
        Action(World.revise, 16, lambda world: any(worker.can_revise() for worker in world.workers)),
        Action(World.revise_badly, 1, lambda world: any(worker.can_revise() for worker in world.workers)),
        Action(World.end, 14, lambda world: any(worker.ended for worker in world.workers)),
        Action(World.catch_up, 1, lambda world: any(not worker.finishing for worker in world.workers)),
        Action(World.renew, 2),
        Action(World.crash, 3),
        Action(World.resend_lost, 3, _may_have_operators),
        Action(World.replay, 2, _may_have_operators),
        Action(World.drop, 1, _may_have_operators),
        Action(World.forget, 1, _may_have_operators),
        Action(World.go_on, 24, lambda world: bool(world.operators)),
        Action(World.interrupt, 1, lambda world: bool(world.operators)),
        Action(World.move_time, 8),
        Action(World.expire, 1, lambda world: bool(world.ended_ids())),
        Action(World.clear, 1),
        Action(World.remember, 1),
        Action(World.come_back, 1, lambda world: world.snapshot is not None),
    )
}


def perform(world: World, step: Step) -> str:
    """Perform a step if it is possible and check its effect; return a note of what was done."""
    action = ACTIONS[step.name]
    if not action.is_possible(world):
        return "-"
    note = action.do(world, step.first, step.second)
    world.check()
    return note


class Chance:
    """Chooses the steps of one run from a seed. Each run prefers some actions, leaves others out, and uses few contents."""

    def __init__(self, seed: int) -> None:
        self._random = random = Random(seed)
        self._weights = {name: action.weight * random.choice((0, 1, 1, 2, 8)) for name, action in ACTIONS.items()}
        for name in ("take", "begin", "finish", "revise", "end", "go_on", "send_foreign"):
            self._weights[name] = max(self._weights[name], ACTIONS[name].weight)
        # Rare actions would hardly ever meet each other, if some runs did not prefer them.
        rare = [name for name, action in ACTIONS.items() if action.weight < _RARE]
        self._weights |= dict.fromkeys(random.sample(rare, random.choice((0, 1, 2, 3))), _OFTEN)
        # With many traces, windows fill up. With few, the same trace is submitted again and again.
        self._contents = random.sample(range(len(IDS)), random.choice((1, 1, 2, 2, 3, 5)))
        self._kinds = random.sample(range(len(KINDS)), random.randint(1, len(KINDS)))
        self._longest_move = random.choice((3, 5, 8, 9, len(MOVES_MS) - 1))
        self._stalls = random.choice((0, 0.2, 0.6))

    def next(self, world: World) -> Step:
        random = self._random
        possible = [name for name, action in ACTIONS.items() if self._weights[name] and action.is_possible(world)]
        name = random.choices(possible, [self._weights[name] for name in possible])[0]
        if name in ("submit", "send_foreign"):
            return Step(name, random.choice(self._contents), random.choice(self._kinds))
        if name == "move_time":
            return Step(
                name, random.randint(0, self._longest_move), random.randrange(8) if random.random() < self._stalls else 0
            )
        return Step(name, random.randint(0, LARGEST_NUMBER), random.randint(0, LARGEST_NUMBER))
