"""What a worker says of itself, and what follows from it."""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

_STATE: Final = 0
_BEGAN: Final = 19

STALE_S: Final = 10.0
"""A worker writes once a second; what is older than this says nothing any more of one that lives."""


class Stall(NamedTuple):
    """For how long a part of a worker has stood still, and for how long it may, in seconds."""

    part: str
    still_s: float
    limit_s: float


class State(NamedTuple):
    """What a worker noted of itself, and when."""

    pid: int
    written_s: float
    """By the monotonic clock, which all processes of a machine share."""
    stalls: tuple[Stall, ...]
    """Of every part that must move."""
    not_ready: tuple[str, ...]
    """Why it takes no work; empty if it does."""

    def as_json(self) -> str:
        """Write it as one line."""
        return json.dumps(self._asdict() | {"stalls": [stall._asdict() for stall in self.stalls]})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what :meth:`as_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            row = json.loads(text)
            stalls = tuple(Stall(str(each["part"]), float(each["still_s"]), float(each["limit_s"])) for each in row["stalls"])
            return cls(int(row["pid"]), float(row["written_s"]), stalls, tuple(map(str, row["not_ready"])))
        except (LookupError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError("expected the state of a worker") from error

    @property
    def is_running(self) -> bool:
        """Whether its process is there. One that has got its id since is younger than what is written."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            pass
        except (OSError, OverflowError):
            return False
        # That clock begins anew when the machine does.
        return 0 <= time.monotonic() - self.written_s <= _running_for_s(self.pid)


def why_not_live(state: State) -> Iterator[str]:
    """Why a worker that noted this last is to be started anew; nothing if it moves.

    One that waits for Redis or the broker moves.
    """
    if not state.is_running:
        yield f"process {state.pid} has ended"
        return
    age_s = time.monotonic() - state.written_s
    if age_s > STALE_S:
        yield f"process {state.pid} has noted nothing for {age_s:.0f} s: it stands still"
        return
    for part, still_s, limit_s in state.stalls:
        if still_s > limit_s:
            yield f"{part}: it has stood still for {still_s:.0f} s, of {limit_s:g} s that it may"


def why_not_ready(state: State) -> Iterator[str]:
    """Why a worker that noted this last takes no work; nothing if it does."""
    reasons = tuple(why_not_live(state))
    yield from reasons or state.not_ready


def _running_for_s(pid: int) -> float:
    """How long ago a process began, or longer if the machine has slept; infinity where the system does not say.

    Nothing at all of one that has ended, and whose parent has not noticed.
    """
    try:
        # Before these stands the program's name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[_STATE] == b"Z":
            return -math.inf
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_BEGAN]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return math.inf
