"""The checks of a trace, and the process that they run in: what a hostile text can stall or end is that, and no worker."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from typing import Any, BinaryIO, Final

from kp_scorer.decision import CheckFailure, CheckResult, Demand, Findings
from kp_scorer.errors import SettingsError
from kp_scorer.logs import library_logger
from kp_scorer.settings.sections import ChecksSettings
from kp_scorer.trace import ReasoningTrace

_ANSWER_BYTES: Final = 65_536

log = library_logger(__name__)


class Checks:
    """Runs checks one after the other, in a process that is started anew after a timeout or a crash; one thread may do so.

    Each line that the process gets is a numbered question, and it answers with a line.
    """

    def __init__(self, settings: ChecksSettings) -> None:
        """Load the checks; raises SettingsError if one is not installed, or cannot be loaded."""
        self._settings = settings
        self._numbers = itertools.count(1)
        # The first start may find no compiled rules.
        self._start(4 * settings.start_s)

    def run(self, trace: ReasoningTrace) -> tuple[CheckResult, ...]:
        """Run those that the trace's privacy level asks for. A failure is part of the result, and logged."""
        content = trace.model_dump_json(exclude_none=True)
        allowed = self._settings.allowed(trace.metadata.privacy_level)
        return tuple(self._run(name, strictest, content) for name, strictest in allowed.items())

    def _run(self, name: str, strictest: Demand | None, content: str) -> CheckResult:
        try:
            # Where this process was forked, its parent asks as well, and each would get answers to the other's questions.
            if not self.close.alive or self._owner != os.getpid():
                self.close()
                self._start(self._settings.start_s)
            answer = self._ask(f"{name} {content}")
            if "findings" in answer:
                findings = Findings.model_validate(answer["findings"])
                demands = {findings.outcome, strictest}
                outcome = None if None in demands else "review" if "review" in demands else "rejected"
                return CheckResult(**dict(findings) | {"name": name, "version": self._versions[name], "outcome": outcome})
            failure: CheckFailure = "error"
            detail = answer["error"]
        except (OSError, ValueError, SettingsError) as error:
            self.close()
            failure = "timeout" if isinstance(error, TimeoutError) else "error"
            detail = str(error) if isinstance(error, SettingsError) else f"its process is ended: {type(error).__name__}"
        log.warning("check_failed", check=name, failure=failure, detail=detail)
        demanded: Demand | None = "review" if strictest else None
        return CheckResult(name=name, version=self._versions[name], failure=failure, outcome=demanded)

    def _start(self, start_s: float) -> None:
        """Start the process, and wait for ``start_s`` at most until it has loaded the checks; raises SettingsError."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [theirs.fileno(), start_s, self._settings.timeout_s, *self._settings.names]
            process = subprocess.Popen(
                # -P: a module in the current folder must not be imported instead of ours.
                [sys.executable, "-P", "-m", "kp_scorer.checks.process", *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                # Whatever a check prints may be text of a trace.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # The worker's passwords are none of its business.
                env={name: value for name, value in os.environ.items() if not name.upper().startswith("KP_")},
                # It must outlive Ctrl-C, as the worker does until its traces are decided, and end with what it starts.
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._channel, self._answers = ours, ours.makefile("rb")
        # Ends the process, which otherwise ends with self.
        self.close = weakref.finalize(self, _end, self._owner, process, self._answers, ours)
        try:
            ours.settimeout(start_s)
            loaded = json.loads(self._answers.readline(_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            loaded = {"problem": f"their process was not ready within {start_s:g} s: {type(error).__name__}"}
        if "problem" in loaded:
            self.close()
            raise SettingsError(f"checks: {loaded['problem']}")
        self._versions: dict[str, str] = loaded["versions"]

    def _ask(self, question: str) -> dict[str, Any]:
        # Send the name of a check and a trace, and wait for the answer. TimeoutError if either takes longer, another OSError or
        # ValueError if the process has ended; then no answer comes. ValueError also if what came is no answer to this question.
        number = next(self._numbers)
        self._channel.settimeout(self._settings.timeout_s)
        self._channel.sendall(f"{number} {question}\n".encode())
        answer = json.loads(self._answers.readline(_ANSWER_BYTES))
        if not isinstance(answer, dict) or answer.get("number") != number:
            raise ValueError("an answer to another question")
        return answer


def _end(owner: int, process: subprocess.Popen[bytes], answers: BinaryIO, channel: socket.socket) -> None:
    answers.close()
    channel.close()
    if os.getpid() != owner:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
