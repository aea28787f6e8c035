"""Looks at a run of the suite as a whole: the tests that it skipped, and the processes that it left running."""

import os
import secrets
import shlex
import signal
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import psutil

RUN: Final = "TEST_RUN"
"""The variable with the number of a run. Processes that the run starts inherit it, so that they can be recognised."""
_ENDING_S: Final = 10.0


def begin() -> None:
    """Give this run a number, and have the signals that end it raise KeyboardInterrupt, so that it cleans up."""
    os.environ[RUN] = str(secrets.randbelow(2**32))
    # While their processors are busy with other tests, torch's threads would spin for seconds as they wait for each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A shell lets its background jobs ignore Ctrl-C, and all processes that tests start would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def end_processes() -> list[str]:
    """Kill the processes of this run that still run some time after its last test; return a line about each."""
    _, left = psutil.wait_procs(_processes(), _ENDING_S)
    lines = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            # pytest set this variable before the test started the process.
            test = process.environ().get("PYTEST_CURRENT_TEST", "a test")
            lines.append(f"killed {process.pid}, which outlived the suite: {shlex.join(process.cmdline())}, started by {test}")
            process.kill()
    return lines


def _processes() -> list[psutil.Process]:
    # psutil gives None for the environment of another user's process.
    running = psutil.process_iter(["environ"])
    return [each for each in running if each.pid != os.getpid() and (each.info["environ"] or {}).get(RUN) == os.environ[RUN]]


def skipped_lines(reports: Iterable[Any]) -> list[str]:
    """Return a line for each reason for which tests were skipped, with their number."""
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    return [f"skipped {count}: {reason}" for reason, count in sorted(reasons.items())]
