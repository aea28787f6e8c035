"""What a shell completes after ``kp-scorer``."""

import pytest
from click.testing import CliRunner
from kp_scorer.cli.main import commands

from tests.support.commands import run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_asks_us(shell: str) -> None:
    done = CliRunner().invoke(commands, ["completion", shell], prog_name="kp-scorer")
    assert f"_KP_SCORER_COMPLETE={shell}_complete" in done.stdout


def test_commands_options_and_files_are_completed() -> None:
    def completed(typed: str) -> list[str]:
        asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_KP_SCORER_COMPLETE": "bash_complete"}
        return run(**asked).stdout.split()

    assert completed("kp-scorer dead-letter s") == ["plain,show"]
    assert completed("kp-scorer score ./tr") == ["file,./tr"]
