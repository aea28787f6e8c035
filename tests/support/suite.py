"""A run of the suite as a whole: what it skipped, and what it started and did not end."""

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
"""The variable with the number of a run. Processes that the run starts inherit it, and are recognised by it anywhere."""
_ENDING_S: Final = 10.0


def begin() -> None:
    """Number this run, and have signals that end it end it in order."""
    os.environ[RUN] = str(secrets.randbelow(2**32))
    # A shell has what runs in the background ignore Ctrl-C, which all that tests start would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def end_processes() -> list[str]:
    """Kill what this run has started and still runs a while after its last test; return a line about each."""
    _, left = psutil.wait_procs(_processes(), _ENDING_S)
    lines = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            # Set by pytest when the process was started.
            test = process.environ().get("PYTEST_CURRENT_TEST", "a test")
            lines.append(f"killed {process.pid}, which outlived the suite: {shlex.join(process.cmdline())}, started by {test}")
            process.kill()
    return lines


def _processes() -> list[psutil.Process]:
    # None: the environment of another user's process.
    running = psutil.process_iter(["environ"])
    return [each for each in running if each.pid != os.getpid() and (each.info["environ"] or {}).get(RUN) == os.environ[RUN]]


def skipped_lines(reports: Iterable[Any]) -> list[str]:
    """A line for each reason of skipping tests, with the number of those."""
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    return [f"skipped {count}: {reason}" for reason, count in sorted(reasons.items())]
