"""The shared cache: admit to the log, bring the mirror up to date, compare."""

from collections.abc import Sequence
from typing import NamedTuple

from kp_scorer.errors import ServiceUnavailable
from kp_scorer.novelty.log import Candidate, NoveltyLog, Place, Window
from kp_scorer.novelty.mirror import Mirror, Nearest


class Placed(NamedTuple):
    """A candidate's place in the log and its nearest earlier entry (None: its window is empty)."""

    place: Place
    nearest: Nearest | None


class NoveltyCache:
    """Joins a log and this process's mirror of it. One thread owns it."""

    def __init__(self, log: NoveltyLog, window: Window, dimensions: int) -> None:
        """Start with an empty mirror; it fills on first use, or by :meth:`catch_up`."""
        self._log = log
        self._mirror = Mirror(window, dimensions)

    @property
    def entries(self) -> int:
        """How many entries the mirror holds. Any thread may ask."""
        return len(self._mirror)

    def catch_up(self) -> int:
        """Read the log to its end, in chunks, and return how many entries the mirror holds.

        Raises:
            SettingsError: the log is not empty, and was begun with another window.
            ServiceUnavailable: the log cannot be reached.
        """
        self._exchange(())
        return len(self._mirror)

    def place(self, candidates: Sequence[Candidate]) -> list[Placed | None]:
        """Append the candidates that are new and compare each with the entries before its own.

        Vectors are compared as the log holds them: a trace that already has a place is compared by its first vector.

        Returns:
            For each candidate its place and nearest entry; None if its id was taken by another digest.

        Raises:
            SettingsError: the log is not empty, and was begun with another window.
            ServiceUnavailable: the log cannot be reached, or was emptied meanwhile; placing again is safe.
        """
        places = self._exchange(candidates)
        try:
            found = iter(self._mirror.nearest([place for place in places if place]))
        except KeyError:
            raise ServiceUnavailable("novelty log: it was emptied while traces were placed in it") from None
        return [Placed(place, next(found)) if place else None for place in places]

    def _exchange(self, candidates: Sequence[Candidate]) -> list[Place | None]:
        # Part of a window would give novelty that the log does not explain, so nothing is compared before the mirror is whole.
        # The candidates go along each time: should the log be trimmed while it is read, those whose windows it cut get new
        # places. That ends, because a batch is small against the slack and against what one round reads.
        while True:
            places, tail = self._log.exchange(candidates, self._mirror.cursor)
            self._mirror.apply(tail)
            if not tail.more:
                return places
