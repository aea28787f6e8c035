"""Works on hostile texts in a separate process with limits on time and memory, so that a text can crash only that process.

Questions and answers are frames: a line with a number and a length, then the content. An answer is JSON, because unpickling it
could run code in the process that asked. This module does not use ``multiprocessing``, or pools built on it: they would run
the main module of the calling program once more, or fork the program with its threads.
"""

import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO, Final, NamedTuple

from kp_scorer.errors import ProcessFailed, ScorerError, SettingsError

_SPARE_S: Final = 1.0  # A process ends itself this long after a limit, if the one that asked has not ended it by then.
_HEADER_BYTES: Final = 64
_QUESTION_BYTES: Final = 2**40  # In practice no limit, as the process that asks is trusted.

Answers = Callable[[bytes], object]  # Turns a question into an answer that JSON can express; an error fails only that question.


class Bounds(NamedTuple):
    """The limits on a process: its time, its memory and the size of its answers."""

    start_s: float  # The time for a restart. The first start may take four times as long, as it may compile something.
    answer_s: float
    memory_bytes: int
    answer_bytes: int = 65_536  # A longer answer is not read, and counts as a crash.


class BoundedProcess:
    """Puts questions to a module in a separate process, and restarts the process after a timeout or a crash.

    Only one thread may ask. The module needs a function ``load``, which takes the arguments and returns a greeting, which is a
    value that JSON can express, and its :data:`Answers`.
    """

    def __init__(self, module: str, arguments: Sequence[str], bounds: Bounds) -> None:
        """Start the process; raise SettingsError if the module cannot be loaded there in time."""
        self._module, self._arguments, self._bounds = module, arguments, bounds
        self._numbers = itertools.count(1)
        self._start(4 * bounds.start_s)

    def ask(self, question: bytes) -> Any:
        """Return the answer to a question.

        Raises:
            TimeoutError: the answer took longer than ``answer_s``; the process has been killed.
            ProcessFailed: the module raised an error, or its process ended. The message never quotes the question.
            SettingsError: the process had ended, and could not be restarted.
        """
        # After a fork, parent and child would ask the same process, and each would get answers to the other's questions. The
        # process may also have been killed since the last question, which this one must not be charged with.
        if not self.close.alive or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            self._start(self._bounds.start_s)
        answer = self._exchange(next(self._numbers), question, self._bounds.answer_s)
        if "error" in answer:
            raise ProcessFailed(answer["error"])
        return answer["answer"]

    def _start(self, start_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            limits = theirs.fileno(), start_s, self._bounds.answer_s, self._bounds.memory_bytes
            self._process = subprocess.Popen(
                # Without -P, a module in the current folder would be imported in place of ours.
                [sys.executable, "-P", "-m", "kp_scorer.bounded", *map(str, limits), self._module, *self._arguments],
                pass_fds=[theirs.fileno()],
                # Discard its output, which may contain text of a trace.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Hide the settings from it, because they may contain passwords.
                env={name: value for name, value in os.environ.items() if not name.upper().startswith("KP_")},
                # In a session of its own, it survives Ctrl-C, as this process does until its work is done, and it can be
                # killed together with its children.
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._channel, self._stream = ours, ours.makefile("rb")
        # Calling this ends the process; otherwise the garbage collection of self does.
        self.close = weakref.finalize(self, _end, self._owner, self._process, self._stream, ours)
        try:
            loaded = self._exchange(0, None, start_s)
        except (TimeoutError, ProcessFailed) as error:
            raise SettingsError(f"{self._module}: it was not loaded within {start_s:g} s: {type(error).__name__}") from None
        if "error" in loaded:
            self.close()
            raise SettingsError(loaded["error"])
        self.greeting = loaded["answer"]

    def _exchange(self, number: int, question: bytes | None, within_s: float) -> dict[str, Any]:
        self._channel.settimeout(within_s)
        try:
            if question is not None:
                self._channel.sendall(_frame(number, question))
            answered, content = _received(self._stream, self._bounds.answer_bytes)
            answer = json.loads(content)
            if answered == number and isinstance(answer, dict):
                return answer
            raise ValueError("an answer to another question")
        except TimeoutError:
            self.close()
            raise
        except (OSError, ValueError) as error:
            self.close()
            raise ProcessFailed(f"its process has ended: {type(error).__name__}") from None


def _end(owner: int, process: subprocess.Popen[bytes], stream: BinaryIO, channel: socket.socket) -> None:
    stream.close()
    channel.close()
    if os.getpid() != owner:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _frame(number: int, content: bytes) -> bytes:
    return b"%d %d\n%b" % (number, len(content), content)


def _received(stream: BinaryIO, most_bytes: int) -> tuple[int, bytes]:
    """Read a frame, and return its number and content; raise ValueError if it is damaged or exceeds ``most_bytes``."""
    number, length = map(int, stream.readline(_HEADER_BYTES).split())
    content = stream.read(length) if length <= most_bytes else b""
    if len(content) != length:
        raise ValueError("expected a whole frame")
    return number, content


def main() -> None:
    """Load a module, and let it answer questions from a socket until the other end closes; ``_start`` passes the arguments."""
    channel, start_s, answer_s, memory_bytes, module, *arguments = sys.argv[1:]
    own_pid, number = os.getpid(), 0
    answers: Answers
    _end_in(float(start_s))
    # Set only the soft limit: a check that needs more may raise it.
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), resource.getrlimit(resource.RLIMIT_DATA)[1]))
    os.set_inheritable(int(channel), False)
    with socket.socket(fileno=int(channel)) as connection, connection.makefile("rb") as stream:
        try:
            greeting, answers = import_module(module).load(arguments)
            reply = {"answer": greeting}
        except BaseException as error:
            reply = {"error": _described(error)}
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                connection.sendall(_frame(number, json.dumps(reply).encode()))
                number, question = _received(stream, _QUESTION_BYTES)
            except (OSError, ValueError):
                # End the process without waiting for threads that the module started.
                os._exit(0)
            _end_in(float(answer_s))
            reply = _reply(answers, question)
            if os.getpid() != own_pid:
                # The module has forked, and this is the child, which must not answer further questions.
                os._exit(1)


def _end_in(seconds: float) -> None:
    # If the process that asks is killed, nobody else can stop an answer that takes forever. The signal ends this process even
    # in native code that never returns to Python.
    signal.setitimer(signal.ITIMER_REAL, seconds + _SPARE_S)


def _reply(answers: Answers, question: bytes) -> dict[str, Any]:
    try:
        return {"answer": answers(question)}
    except MemoryError:
        os._exit(1)
    except BaseException as error:
        return {"error": _described(error)}


def _described(error: BaseException) -> str:
    if isinstance(error, ScorerError):
        return str(error)
    # Leave out the message, which may quote the question.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}, raised by {frame.name} in {frame.filename}:{frame.lineno}"


if __name__ == "__main__":
    main()
