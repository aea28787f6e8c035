"""The dead letters in Redis: one hash each, and an index by the time each was last dead-lettered."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final, NamedTuple, cast

import redis
import structlog

from kp_scorer.decision import Decision, Received
from kp_scorer.errors import REASONS, Reason, ServiceUnavailable
from kp_scorer.settings.sections import LedgerSettings
from kp_scorer.store.connection import in_one_trip, reports_outages
from kp_scorer.store.keys import KEPT_S, Keys
from kp_scorer.store.records import DAMAGED_DECISION, dead_letter_id_of, number_in, parsed_in, text_in
from kp_scorer.store.scripts import script

_READ_AT_ONCE: Final = 500
_DROPPED_AT_ONCE: Final = 100  # Dropping this many takes Redis some 10 ms.

log = structlog.get_logger("kp_scorer.store.dead_letters")


class DeadLettering(NamedTuple):
    """The reason why a submission, or a message that is not a submission, gets no decision."""

    reason: Reason
    detail: str  # Field paths and figures, never content.
    trace_id: str = ""  # The id in the submission or in its message's header; empty if there is none.
    digest: bytes = b""  # The digest of the trace; empty if there is none, or it was not decoded.
    deliveries: int = 1  # The number of deliveries; 0 if it was lost before the first.


class DeadLetter(NamedTuple):
    """A dead letter without its payload. Times are Unix time by Redis' clock."""

    letter_id: str  # BLAKE2b-128 of the payload, in hex: the same bytes are the same dead letter.
    reason: str
    detail: str  # Field paths and figures, never content.
    trace_id: str  # Empty if the submission has none.
    deliveries: int  # The number of deliveries; 0 if it was lost, and then the detail has the number of sendings.
    first_ms: int
    last_ms: int  # The time of the last dead-lettering, if it was redelivered, or submitted and failed again.
    occurrences: int
    size_bytes: int
    worker: str = ""  # The worker that dead-lettered it last; empty if no worker received it.
    queued_ms: int | None = None  # The time that it was queued before that; None if nothing says when it was sent.


_TEXTS: Final = ("reason", "detail", "trace_id", "worker")
_NUMBERS: Final = ("deliveries", "first_ms", "last_ms", "burials", "queued_ms")


def _letter(letter_id: str, fields: Sequence[Any], size_bytes: int) -> DeadLetter:
    reason, detail, trace_id, worker = map(text_in, fields[: len(_TEXTS)])
    deliveries, first_ms, last_ms, occurrences, queued_ms = map(number_in, fields[len(_TEXTS) :])
    figures = deliveries, first_ms, last_ms, occurrences, size_bytes
    return DeadLetter(letter_id, reason, detail, trace_id, *figures, worker, None if fields[-1] is None else queued_ms)


class _Bounds(NamedTuple):
    ttl_ms: int
    most: int
    most_bytes: int


@script(tuple[bytes, int])
def _dead_letter(
    *,
    keys: Keys,
    dead_letter_id: str,
    why: DeadLettering,
    worker: str,
    queued_ms: str,
    payload: bytes,
    unreadable: bytes,
    record_ttl_ms: int,
    bounds: _Bounds,
) -> None: ...


@script(int)
def _begin_reading(*, reading: str, kept_ms: int) -> None: ...


@script(tuple[list[bytes], int])
def _make_room(*, keys: Keys, at_once: int, bounds: _Bounds) -> None: ...


@script(bool)
def _drop(*, keys: Keys, dead_letter_id: str, trace_id: str, chosen_burials: int, chosen_last_ms: int) -> None: ...


@reports_outages("dead letters")
class DeadLetters:
    """The dead letters, each kept for 30 days after it was last dead-lettered, unless others need its room.

    There are two kinds, each within the same bounds: junk, which is malformed, invalid or in conflict with another submission,
    and the rest. Over its bounds the oldest of a kind make room, so that no junk pushes out a trace that failed. Methods raise
    ServiceUnavailable without Redis.
    """

    def __init__(self, client: redis.Redis, keys: Keys, settings: LedgerSettings) -> None:
        # These are called, in the calling thread, for each dead letter that is stored, and for those that make room for others.
        self.on_stored: Callable[[Reason], None] = lambda reason: None
        self.on_dropped: Callable[[Reason, int], None] = lambda reason, count: None
        self._client = client
        self._keys = keys
        self._record_ttl_ms = settings.ttl_ms
        # A dead letter must not expire before the record that died by it.
        ttl_ms = max(KEPT_S * 1_000, settings.ttl_ms)
        self._bounds = _Bounds(ttl_ms, settings.max_dead_letters, settings.max_dead_letter_bytes)

    def dead_letter(self, payload: bytes, why: DeadLettering, received: Received | None = None) -> Decision | None:
        """Store a submission's bytes with the reason, log it, and end its trace's record if that is of the same submission.

        ``payload`` is the submission as UTF-8 JSON, or the body of a malformed message; ``received`` describes its last
        delivery. A record of another submission with the same ``trace_id`` is left alone. If this very submission has been
        decided, return the decision and store nothing.
        """
        queued_ms = "" if received is None or received.queued_ms is None else str(received.queued_ms)
        stored = b""
        while True:
            stored, has_too_many = _dead_letter(
                self._client,
                keys=self._keys,
                dead_letter_id=dead_letter_id_of(payload),
                why=why,
                worker=received.worker if received else "",
                queued_ms=queued_ms,
                payload=payload,
                unreadable=stored,
                record_ttl_ms=self._record_ttl_ms,
                bounds=self._bounds,
            )
            if not stored:
                break
            if decision := parsed_in(Decision, stored):
                return decision
            why = why._replace(reason="damaged", detail=DAMAGED_DECISION)
        described = received.model_dump() if received else {}
        log.warning("trace_dead", trace_id=why.trace_id, reason=why.reason, detail=why.detail, **described)
        self.on_stored(why.reason)
        if has_too_many:
            try:
                self.make_room()
            except ServiceUnavailable as error:
                # The submission is stored all the same and must not be dead-lettered again; the next one makes room.
                log.warning("dead_letters_not_dropped", detail=str(error))
        return None

    def begin_reading(self, message: bytes) -> int:
        """Note that a suspect message is about to be read; return how many began and did not end, this one included."""
        key = self._keys.reading(dead_letter_id_of(message))
        return _begin_reading(self._client, reading=key, kept_ms=KEPT_S * 1_000)

    def end_reading(self, message: bytes) -> None:
        """Note that a reader has read a suspect message to its end."""
        self._client.delete(self._keys.reading(dead_letter_id_of(message)))

    def make_room(self) -> None:
        """Drop dead letters while they exceed the bounds, each with the record that died by it.

        Junk also makes room for submissions while Redis accepts no more of them.
        """
        dropped = Counter[bytes]()
        has_too_many = 1
        while has_too_many:
            reasons, has_too_many = _make_room(self._client, keys=self._keys, at_once=_DROPPED_AT_ONCE, bounds=self._bounds)
            dropped.update(reasons)
        for reason, count in dropped.items():
            log.warning("dead_letters_dropped", reason=reason.decode(), count=count)
            self.on_dropped(cast("Reason", reason.decode()), count)

    def dead_lettered(self) -> dict[Reason, int]:
        """Return the number of dead-letterings since the ledger began, by reason; also those by processes that have died."""
        counts: Any = self._client.hmget(self._keys.counts, REASONS)
        return dict(zip(REASONS, map(number_in, counts), strict=True))

    def dropped(self) -> dict[str, int]:
        """Return the number of dead letters that made room for others, by reason; reasons without any are left out."""
        counts: Any = self._client.hgetall(self._keys.dropped)
        return {text_in(reason): number_in(count) for reason, count in sorted(counts.items())}

    def count(self) -> int:
        """Return the number of dead letters."""
        return int(self._client.zcard(self._keys.dead_letters))

    def read(self, *beginnings: str) -> Iterator[DeadLetter]:
        """Yield all dead letters, or those whose ids have one of these beginnings; the one last dead-lettered comes last."""
        ids: Any = self._client.zrange(self._keys.dead_letters, 0, -1)
        wanted = (letter_id for letter_id in map(text_in, ids) if letter_id.startswith(beginnings or ""))
        while chunk := list(islice(wanted, _READ_AT_ONCE)):
            keys = map(self._keys.dead_letter, chunk)
            commands = ((("HMGET", key, *_TEXTS, *_NUMBERS), ("HSTRLEN", key, "payload")) for key in keys)
            replies = in_one_trip(self._client, chain.from_iterable(commands))
            letters = zip(chunk, replies[::2], replies[1::2], strict=True)
            # A dead letter without a reason was dropped, or has expired.
            yield from (_letter(*each) for each in letters if each[1][0] is not None)

    def payload(self, letter_id: str) -> bytes:
        """Return a dead letter's payload; empty if the dead letter no longer exists."""
        payload: Any = self._client.hget(self._keys.dead_letter(letter_id), "payload")
        return payload or b""

    def drop(self, letter: DeadLetter) -> bool:
        """Remove a dead letter and the record that died by it; return False if it is gone or was dead-lettered again."""
        return _drop(
            self._client,
            keys=self._keys,
            dead_letter_id=letter.letter_id,
            trace_id=letter.trace_id,
            chosen_burials=letter.occurrences,
            chosen_last_ms=letter.last_ms,
        )
