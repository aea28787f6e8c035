"""Run code up to its next call of a script, and on when the test says so: in a thread, but never two at once."""

import threading
from collections.abc import Callable
from typing import Final

_own: Final = threading.local()


class Gone(BaseException):
    """The process that ran this has died."""


class Violation(AssertionError):
    """The books are not what the specification says. Nothing may swallow it, whatever handler it passes on its way."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        stretch: Stretch | None = getattr(_own, "stretch", None)
        if stretch is not None:
            stretch.violation = self


class Stretch:
    """A function that stops before each of its calls to the outside. Its maker must end it, or let it die."""

    def __init__(self, function: Callable[[], object]) -> None:
        """Start the function, which runs up to its first stop."""
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
        """Make the call that is next and run up to the one after; or let the call raise ``thrown``."""
        self._thrown = thrown
        self._go.release()
        self._wait()

    def die(self) -> None:
        """End the function where it has stopped, as if its process were killed."""
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
        """Called by the function itself: wait until it may make the call."""
        self.next_call = next_call
        self._back.release()
        self._go.acquire()
        if self._thrown is not None:
            raise self._thrown


def stop_before(call: str) -> None:
    """Stop here if this is run as a stretch."""
    stretch: Stretch | None = getattr(_own, "stretch", None)
    if stretch is not None:
        stretch.stop(call)
