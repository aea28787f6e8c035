"""Work on hostile texts in a process of its own, bounded in time and memory: a text can end that process, and nothing else.

A question and its answer are frames: a line with a number and a length, then as many bytes. Answers are JSON: to unpickle them
could run code in the process that asked. ``multiprocessing``, and pools that build on it, would run the main module of the
program that uses this package once more, or fork it with its threads.
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

_SPARE_S: Final = 1.0
_HEADER_BYTES: Final = 64
_QUESTION_BYTES: Final = 2**40  # Whoever asks is trusted.

Answers = Callable[[bytes], object]  # From a question to what JSON has; its errors fail that question alone.


class Bounds(NamedTuple):
    """The time and the memory that a process may take."""

    start_s: float  # To start anew; the first start may take four times as long, as it may have to compile something.
    answer_s: float
    memory_bytes: int
    answer_bytes: int = 65_536  # The longest answer that is read.


class BoundedProcess:
    """Asks a module in a process of its own, which is started anew after a timeout or a crash. One thread may ask.

    The module has a function ``load``, from the arguments to a greeting, which JSON has, and to its :data:`Answers`.
    """

    def __init__(self, module: str, arguments: Sequence[str], bounds: Bounds) -> None:
        """Start the process; raises SettingsError if the module cannot be loaded there in time."""
        self._module, self._arguments, self._bounds = module, arguments, bounds
        self._numbers = itertools.count(1)
        self._start(4 * bounds.start_s)

    def ask(self, question: bytes) -> Any:
        """Return the answer to a question.

        Raises:
            TimeoutError: it took longer than ``answer_s``, and the process was ended.
            ProcessFailed: an error was the answer, or the process ended. The message quotes no question.
            SettingsError: the process had to be started anew and could not be.
        """
        # Where this process was forked, its parent asks as well, and each would get answers to the other's questions.
        if not self.close.alive or self._owner != os.getpid():
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
            process = subprocess.Popen(
                # -P: a module in the current folder must not be imported instead of ours.
                [sys.executable, "-P", "-m", "kp_scorer.bounded", *map(str, limits), self._module, *self._arguments],
                pass_fds=[theirs.fileno()],
                # Whatever it prints may be text of a trace.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Our passwords are none of its business.
                env={name: value for name, value in os.environ.items() if not name.upper().startswith("KP_")},
                # It must outlive Ctrl-C, as this process does until its work is done, and end with what it starts.
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._channel, self._stream = ours, ours.makefile("rb")
        # Ends the process, which otherwise ends with self.
        self.close = weakref.finalize(self, _end, self._owner, process, self._stream, ours)
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
    """Read a frame; ValueError if there is none, or a longer one."""
    number, length = map(int, stream.readline(_HEADER_BYTES).split())
    content = stream.read(length) if length <= most_bytes else b""
    if len(content) != length:
        raise ValueError("expected a whole frame")
    return number, content


def main() -> None:
    """Answer the questions from a channel with a module, until the other end is closed; see ``_start`` for the arguments."""
    channel, start_s, answer_s, memory_bytes, module, *arguments = sys.argv[1:]
    own_pid, number = os.getpid(), 0
    answers: Answers
    _end_in(float(start_s))
    # Only the soft limit: a check that needs more may raise it.
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
                # Threads that the module started do not keep it.
                os._exit(0)
            _end_in(float(answer_s))
            reply = _reply(answers, question)
            if os.getpid() != own_pid:
                # The module forked, and its child returned.
                os._exit(1)


def _end_in(seconds: float) -> None:
    # Who kills the process that asks leaves nobody to end an answer that does not end. This signal needs no Python for it.
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
    # Its message may quote the question.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}, raised by {frame.name} in {frame.filename}:{frame.lineno}"


if __name__ == "__main__":
    main()
