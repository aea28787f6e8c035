"""Holds chats back while a later one may continue them, because a log repeats a chat for each call of the model."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

from kp_scorer.adapters.building import Run, digests_of

_MOST_REMEMBERED: Final = 500_000  # The most digests, of records and of beginnings, that are remembered to recognise copies.

_OF_WHOLE: Final = b"whole run "  # Before a digest, because a whole run repeats only its parts, and not other chats.


def remember(remembered: dict[bytes, None], digests: Iterable[bytes]) -> None:
    """Remember these digests, and forget the oldest ones if there are too many."""
    remembered |= dict.fromkeys(digests)
    while len(remembered) > _MOST_REMEMBERED:
        del remembered[next(iter(remembered))]


class Chats:
    """The chats that wait until it is clear that none continues them."""

    def __init__(self, counts: Counter[str]) -> None:
        """Count as ``continued`` in ``counts`` the chats that are not runs of their own, because another continues them."""
        self._counts = counts
        self._by_digest: OrderedDict[bytes, list[Run]] = OrderedDict()  # The waiting chats, by the digest of all their pieces.
        self._waiting = 0
        self._beginnings: dict[bytes, None] = {}  # Digests of the beginnings of chats and, after ``_OF_WHOLE``, of whole runs.

    def hold(self, run: Run) -> None:
        """Hold a chat back, in place of those that it continues."""
        *earlier, digest = digests_of(run.pieces)
        if digest in self._beginnings or (run.is_part and _OF_WHOLE + digest in self._beginnings):
            # Another run, which continues this one, came before it: a log may have its newest record first.
            self._counts["continued"] += 1
            return
        remember(self._beginnings, earlier)
        self._counts["continued"] += sum(len(self._pop(each)) for each in earlier)
        # Hold each of them: several runs of one task may be equal so far.
        self._by_digest.setdefault(digest, []).append(run)
        self._waiting += 1

    def drop_parts_of(self, run: Run) -> None:
        """Drop the chats that are beginnings of a whole run: another instrumentation may record its calls by themselves."""
        digests = list(digests_of(run.pieces))
        remember(self._beginnings, (_OF_WHOLE + digest for digest in digests))
        for digest in digests if self._by_digest else ():
            if any(chat.is_part for chat in self._by_digest.get(digest, ())):
                self._counts["continued"] += len(self._pop(digest))

    def beyond(self, most: int) -> Iterator[Run]:
        """Remove and yield the oldest chats, until at most ``most`` wait."""
        while self._waiting > most:
            yield from self._pop(next(iter(self._by_digest)))

    def _pop(self, digest: bytes) -> list[Run]:
        chats = self._by_digest.pop(digest, [])
        self._waiting -= len(chats)
        return chats
