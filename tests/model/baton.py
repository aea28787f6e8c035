"""Runs code in a thread that stops before each call of a script and goes on when the test says so; only one runs at a time."""

import threading
from collections.abc import Callable
from typing import Final

_own: Final = threading.local()


class Gone(BaseException):
    """Raised in a stretch to end it, as if its process had died."""


class Violation(AssertionError):
    """Raised when Redis does not hold what the specification says. No handler on its way can hide it from the test."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        stretch: Stretch | None = getattr(_own, "stretch", None)
        if stretch is not None:
            stretch.violation = self


class Stretch:
    """A function that stops before each of its calls to the outside. Whoever starts it must run it to its end or let it die."""

    def __init__(self, function: Callable[[], object]) -> None:
        """Start the function and run it up to its first stop."""
        self.is_done = False
        self.next_call = ""
        self.error: Exception | None = None
        self.violation: Violation | None = None
        self._function = function
        self._thrown: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    def run_on(self, thrown: BaseException | None = None) -> None:
        """Let the function make its next call, or let the call raise ``thrown``, and run it up to its next stop."""
        self._thrown = thrown
        self._go.release()
        self._wait()

    def die(self) -> None:
        """End the function where it stands, as if its process had been killed."""
        self.violation = None
        while not self.is_done:
            self.run_on(Gone())

    def _wait(self) -> None:
        self._back.acquire()
        if self.is_done:
            self._thread.join()
        if self.violation is not None:
            raise self.violation

    def _run(self) -> None:
        _own.stretch = self
        try:
            self._function()
        except Gone:
            pass
        except Exception as error:
            self.error = error
        self.is_done = True
        self._back.release()

    def stop(self, next_call: str) -> None:
        """Wait, in the function's own thread, until the function may make its next call."""
        self.next_call = next_call
        self._back.release()
        self._go.acquire()
        if self._thrown is not None:
            raise self._thrown


def stop_before(call: str) -> None:
    """Stop here if the code runs as a stretch; elsewhere do nothing."""
    stretch: Stretch | None = getattr(_own, "stretch", None)
    if stretch is not None:
        stretch.stop(call)
