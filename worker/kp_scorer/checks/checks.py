"""The checks of a trace, and the process that they run in: what a hostile text can stall or end is that, and no worker."""

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from typing import Any, BinaryIO, Final

import structlog

from kp_scorer.decision import CheckFailure, CheckResult, Demand, Findings
from kp_scorer.errors import SettingsError
from kp_scorer.settings.sections import ChecksSettings
from kp_scorer.trace import ReasoningTrace

_ANSWER_BYTES: Final = 65_536

log = structlog.get_logger("kp_scorer.checks")


class Checks:
    """Runs checks one after the other, in a process that is started anew after a timeout or a crash; one thread may do so."""

    def __init__(self, settings: ChecksSettings) -> None:
        """Load the checks; raises SettingsError if one is not installed, or cannot be loaded."""
        self._settings = settings
        # The first start may find no compiled rules.
        self._process: _Process | None = _Process(settings, 4 * settings.start_s)
        self._versions = self._process.versions

    def run(self, trace: ReasoningTrace) -> tuple[CheckResult, ...]:
        """Run those that the trace's privacy level asks for. A failure is part of the result, and logged."""
        content = trace.model_dump_json(exclude_none=True)
        allowed = self._settings.allowed(trace.metadata.privacy_level)
        return tuple(self._run(name, strictest, content) for name, strictest in allowed.items())

    def close(self) -> None:
        """End the process."""
        if self._process:
            self._process.end()
            self._process = None

    def _run(self, name: str, strictest: Demand | None, content: str) -> CheckResult:
        common: dict[str, Any] = {"name": name, "version": self._versions[name]}
        try:
            self._process = self._process or _Process(self._settings, self._settings.start_s)
            answer = self._process.ask(f"{name} {content}\n".encode(), self._settings.timeout_s)
            if "findings" in answer:
                findings = Findings.model_validate(answer["findings"])
                demands = {findings.outcome, strictest}
                outcome = None if None in demands else "review" if "review" in demands else "rejected"
                return CheckResult(**dict(findings) | common | {"outcome": outcome})
            failure: CheckFailure = "error"
            detail = answer["error"]
        except (OSError, ValueError, SettingsError) as error:
            self.close()
            failure = "timeout" if isinstance(error, TimeoutError) else "error"
            detail = str(error) if isinstance(error, SettingsError) else f"its process is ended: {type(error).__name__}"
        log.warning("check_failed", check=name, failure=failure, detail=detail)
        return CheckResult(**common, failure=failure, outcome="review" if strictest else None)


class _Process:
    """One process, from its start to its end. Each line that it gets is a trace, and it answers with a line."""

    def __init__(self, settings: ChecksSettings, start_s: float) -> None:
        """Wait for ``start_s`` at most until it has loaded the checks; raises SettingsError."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [theirs.fileno(), start_s, settings.timeout_s, *settings.names]
            process = subprocess.Popen(
                # -P: a module in the current folder must not be imported instead of ours.
                [sys.executable, "-P", "-m", "kp_scorer.checks.process", *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                # Whatever a check prints may be text of a trace.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # The worker's passwords are none of its business.
                env={name: value for name, value in os.environ.items() if not name.startswith("KP_")},
                # It must outlive Ctrl-C, as the worker does until its traces are decided, and end with what it starts.
                start_new_session=True,
            )
        self._channel, self._answers = ours, ours.makefile("rb")
        self.end = weakref.finalize(self, _end, process, self._answers, ours)
        """End it; at the latest it ends with this object, or with the worker."""
        try:
            loaded = self.ask(b"", start_s)
        except (OSError, ValueError) as error:
            loaded = {"problem": f"their process was not ready within {start_s:g} s: {type(error).__name__}"}
        if "problem" in loaded:
            self.end()
            raise SettingsError(f"checks: {loaded['problem']}")
        self.versions: dict[str, str] = loaded["versions"]

    def ask(self, line: bytes, timeout_s: float) -> Any:
        """Send a line, and wait for the answer.

        TimeoutError if either takes longer, another OSError or ValueError if the process has ended; then no answer comes.
        """
        self._channel.settimeout(timeout_s)
        self._channel.sendall(line)
        return json.loads(self._answers.readline(_ANSWER_BYTES))


def _end(process: subprocess.Popen[bytes], answers: BinaryIO, channel: socket.socket) -> None:
    answers.close()
    channel.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
