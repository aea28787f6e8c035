"""In whatever order the scripts run, the ledger matches the specification, and every trace comes to an end."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import pytest

from tests.model.actions import Step
from tests.model.runs import cut_down, prepared, repeat, run
from tests.model.scenarios import SCENARIOS
from tests.model.server import Server

RUNS: Final = 40
LENGTH: Final = 100


@pytest.mark.parametrize("steps", SCENARIOS.values(), ids=list(SCENARIOS))
def test_specification_holds_for_steps_chosen_by_hand(server: Server, steps: Sequence[Step]) -> None:
    with prepared():
        failure = repeat(server, 0, steps)
    assert failure is None, str(failure)


def test_specification_holds_for_steps_chosen_by_chance(server: Server) -> None:
    executed = Counter[str]()
    with prepared():
        for seed in range(RUNS):
            failure = run(server, seed, LENGTH, executed)
            assert failure is None, str(cut_down(server, failure))
    assert executed.total() == RUNS * LENGTH
