"""Whatever the order in which the scripts run, the books are what the specification says, and everything comes to an end."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.actions import Step
from tests.model.machine import BooksMachine
from tests.model.runs import cut_down, prepared, repeat, run
from tests.model.scenarios import SCENARIOS
from tests.model.server import Server

_CI: Final = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

RUNS: Final = 100
LENGTH: Final = 100


@pytest.mark.parametrize("steps", SCENARIOS.values(), ids=list(SCENARIOS))
def test_books_hold_for_steps_chosen_by_hand(server: Server, steps: Sequence[Step]) -> None:
    with prepared():
        failure = repeat(server, 0, steps)
    assert failure is None, str(failure)


def test_books_hold_for_steps_that_hypothesis_chooses(server: Server) -> None:
    class Machine(BooksMachine):
        pass

    Machine.server = server
    with prepared():
        run_state_machine_as_test(Machine, settings=_CI)


def test_books_hold_for_steps_chosen_by_chance(server: Server) -> None:
    executed, cells = Counter[str](), Counter[str]()
    with prepared():
        for seed in range(RUNS):
            failure = run(server, seed, LENGTH, executed, cells)
            assert failure is None, str(cut_down(server, failure))
    assert executed.total() == RUNS * LENGTH
