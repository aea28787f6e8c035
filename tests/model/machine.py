"""The world as a machine of hypothesis: it chooses the steps, and cuts down what fails."""

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.model.actions import ACTIONS, LARGEST_NUMBER, Action, Step, perform
from tests.model.drain import drain
from tests.model.server import Server
from tests.model.world import World


class BooksMachine(RuleBasedStateMachine):
    """A rule for each action; its two numbers choose what it is done to."""

    server: ClassVar[Server]

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.server)

    def teardown(self) -> None:
        try:
            drain(self.world)
        finally:
            self.world.close()


def _add_rule(action: Action) -> None:
    def do(self: BooksMachine, first: int, second: int) -> None:
        perform(self.world, Step(action.name, first, second))

    def is_possible(self: Any) -> bool:
        return action.is_possible(self.world)

    do.__name__ = action.name
    numbers = st.integers(0, LARGEST_NUMBER)
    setattr(BooksMachine, action.name, precondition(is_possible)(rule(first=numbers, second=numbers)(do)))


for _action in ACTIONS.values():
    _add_rule(_action)
