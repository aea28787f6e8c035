"""The model notices almost every script with one thing wrong."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Final

import pytest
from redis.exceptions import ResponseError

from tests.model.mutations import mutants_of
from tests.model.patched_scripts import Mutant
from tests.model.runs import Failure, prepared, repeat, run
from tests.model.scenarios import SCENARIOS
from tests.model.server import Server

pytestmark = pytest.mark.slow

LENGTH: Final = 100
RUNS: Final = 2

UNNOTICED: Final = {
    "acquire": 0,
    "append": 6,
    "claim_lost": 9,
    "commit": 11,
    "count_resend": 1,
    "dead_letter": 11,
    "drop": 1,
    "erase_entries": 0,
    "erase_records": 0,
    "ledger": 3,
    "make_room": 0,
    "release": 0,
    "renew": 1,
    "revise": 6,
    "submit": 2,
}
"""How many mutants of each script do no harm in the model, in which nobody else damages records and no memory is full. Tests in
`tests/hostile` and `tests/integration` have what they would harm."""


@pytest.mark.parametrize("script", UNNOTICED)
def test_mutants_are_noticed(server: Server, script: str) -> None:
    unnoticed = [mutant.meaning for mutant in mutants_of(script) if not is_noticed(server, mutant)]
    assert len(unnoticed) <= UNNOTICED[script], "\n".join(unnoticed)


def is_noticed(server: Server, mutant: Mutant) -> bool:
    by_chance = [partial(run, server, seed, LENGTH, Counter[str]()) for seed in range(RUNS)]
    by_hand = [partial(repeat, server, 0, steps) for steps in SCENARIOS.values()]
    with prepared(mutant):
        # The first run notices most of them, the scenarios most of the others.
        return any(map(fails, chain(by_chance[:1], by_hand, by_chance[1:])))


def fails(attempt: Callable[[], Failure | None]) -> bool:
    try:
        return attempt() is not None
    except ResponseError:
        # The script itself fails.
        return True
