"""The units for systemd: it understands every line, and their times and limits agree with the settings."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
from kp_scorer.errors import SettingsError
from kp_scorer.settings import Settings

from tests.support.paths import REPOSITORY

UNITS: Final = REPOSITORY / "deploy" / "systemd"
SERVICE: Final = "kp-scorer@.service"
INSTALLED: Final = "/opt/kp-scorer/bin/kp-scorer"


def lines_of(unit: str) -> list[tuple[str, str]]:
    """The assignments of a unit."""
    text = (UNITS / unit).read_text("utf-8")
    return [(name, value) for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)]


def value_of(name: str) -> str:
    return dict(lines_of(SERVICE))[name]


def verified(directory: Path) -> "subprocess.CompletedProcess[str]":
    """What systemd says of the units in a directory."""
    if not shutil.which("systemd-analyze"):
        if os.environ.get("CI"):
            pytest.fail("systemd-analyze, of Debian's package systemd, must be there in CI")
        pytest.skip("there is no systemd-analyze here")
    # It also asks whether the program is there.
    for unit in UNITS.iterdir():
        (directory / unit.name).write_text(unit.read_text("utf-8").replace(INSTALLED, "/bin/true"), "utf-8")
    units = sorted(map(str, directory.iterdir()))
    return subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)


def test_systemd_has_nothing_to_say_against_the_units(tmp_path: Path) -> None:
    done = verified(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_has_its_time_to_stop_and_some_seconds_more() -> None:
    assert Settings().worker.grace_s + 5 <= int(value_of("TimeoutStopSec")) <= Settings().worker.grace_s + 30


def test_a_worker_may_wait_for_redis_and_for_the_broker_before_it_is_ready() -> None:
    assert int(value_of("TimeoutStartSec")) > 2 * Settings().worker.patience_s


def test_a_wrong_setting_is_not_tried_again() -> None:
    assert int(value_of("RestartPreventExitStatus")) == SettingsError.exit_code


def test_all_instances_belong_to_the_target() -> None:
    target = "kp-scorer.target"
    assert (UNITS / target).is_file()
    assert {name for name, value in lines_of(SERVICE) if value == target} == {"PartOf", "WantedBy"}
