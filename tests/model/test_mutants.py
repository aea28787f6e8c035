"""The model notices what may be wrong with a script."""

import pytest

from tests.model.mutants import MUTANTS, kill
from tests.model.patched_scripts import Mutant
from tests.model.server import Server


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.script}: {mutant.meaning}")
def test_mutant_is_noticed(server: Server, mutant: Mutant) -> None:
    assert kill(server, mutant), "not noticed"
