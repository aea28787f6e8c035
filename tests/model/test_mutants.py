"""The model detects almost every script with a fault in it."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
from redis.exceptions import ResponseError

from tests.model.mutations import mutants_of
from tests.model.patched_scripts import Mutant
from tests.model.runs import Failure, prepared, repeat, run
from tests.model.scenarios import SCENARIOS
from tests.model.server import Server
from tests.model.unnoticed import UNNOTICED

pytestmark = pytest.mark.slow

LENGTH: Final = 100
RUNS: Final = 2

Attempt = Callable[[], Failure | None]


@pytest.mark.parametrize("script", UNNOTICED)
def test_mutants_are_noticed(server: Server, script: str) -> None:
    mutants = {mutant.meaning: mutant for mutant in mutants_of(script)}
    assert mutants.keys() >= set(UNNOTICED[script])
    to_notice = mutants.keys() - UNNOTICED[script]
    # The first random run detects most mutants, and the scenarios detect most of the others.
    first, *by_chance = (partial(run, server, seed, LENGTH, Counter[str]()) for seed in range(RUNS))
    attempts: list[Attempt] = [first, *(partial(repeat, server, 0, steps) for steps in SCENARIOS.values()), *by_chance]
    assert [meaning for meaning in sorted(to_notice) if not is_noticed(mutants[meaning], attempts)] == []


def is_noticed(mutant: Mutant, attempts: list[Attempt]) -> bool:
    """Return whether one of the attempts fails; move that one to the front, as it often detects the next mutant, too."""
    with prepared(mutant):
        for attempt in attempts:
            if fails(attempt):
                attempts.remove(attempt)
                attempts.insert(0, attempt)
                return True
    return False


def fails(attempt: Attempt) -> bool:
    try:
        return attempt() is not None
    except ResponseError:
        # A fault that makes the script itself fail counts as noticed.
        return True
