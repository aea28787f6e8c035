"""The dead letters in Redis: one hash each, and an index by the time each was last heard of."""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import redis
import structlog

from kp_scorer.decision import Decision
from kp_scorer.errors import Reason, ServiceUnavailable
from kp_scorer.settings import LedgerSettings
from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import KEPT_S, Keys
from kp_scorer.store.scripts import lua_source
from kp_scorer.store.submissions import letter_id_of

_READ_CHUNK: Final = 500
_DROPPED_AT_ONCE: Final = 100
"""So many take Redis some 10 ms."""

log = structlog.get_logger("kp_scorer.store.dead_letters")


OnBurial = Callable[[Reason], None]


def nobody_told(_: Reason) -> None:
    """Take no notice of a dead letter."""


class DeadLetter(NamedTuple):
    """A dead letter, all but its payload."""

    letter_id: str
    """BLAKE2b-128 of the payload, in hex: the same bytes are the same dead letter."""
    reason: str
    detail: str
    """Field paths and figures, never content."""
    trace_id: str
    """Empty where the submission had none to speak of."""
    deliveries: int
    """How often it was delivered until it was given up; 0 if it was lost, when the detail says how often it was sent."""
    first_ms: int
    """When it was first buried, in Unix time by Redis' clock."""
    last_ms: int
    """When it was last buried: redelivered, or submitted and failed again."""
    burials: int
    """How often it was buried."""
    size_bytes: int
    """Size of its payload."""


class DeadLetters:
    """The dead-letter queue, each letter kept for 30 days after it was last heard of, unless newer ones need its room."""

    def __init__(self, client: redis.Redis, keys: Keys, settings: LedgerSettings, on_burial: OnBurial = nobody_told) -> None:
        """Use the dead letters under the prefix of ``keys``; the settings say how many are kept.

        ``on_burial`` is called with the reason of each that is kept by way of this object, by the thread that keeps it.
        """
        self._on_burial = on_burial
        self._client = client
        self._keys = keys
        self._record_ttl_ms = settings.ttl_ms
        # No record outlives the letter that tells what it died of.
        kept_ms = max(KEPT_S * 1_000, settings.ttl_ms)
        self._bounds = kept_ms, settings.max_dead_letters, settings.max_dead_letter_bytes
        self._bury, self._make_room, self._drop = (
            client.register_script(lua_source(__package__, name)) for name in ("bury", "make_room", "drop")
        )

    def bury(
        self, payload: bytes, reason: Reason, detail: str, trace_id: str = "", digest: bytes = b"", deliveries: int = 1
    ) -> Decision | None:
        """Keep a submission's bytes and why it is dead, log it, and end its trace's record if that is of the same submission.

        If there are too many letters by then, or too large ones, the oldest are dropped, each with the record that died by it.

        Args:
            payload: the submission as UTF-8 JSON; if it is malformed, the body of the message as it came.
            reason: the class of what is wrong.
            detail: what exactly: field paths and figures, never content.
            trace_id: what it calls itself. The record of another submission of that name comes to no harm.
            digest: of what it says, if it could be decoded.
            deliveries: how often the submission was delivered.

        Returns:
            The decision on this very submission, if there is one: then nothing is buried.

        Raises:
            ServiceUnavailable: Redis cannot be reached; the submission must be given back, not acknowledged.
        """
        letter_id = letter_id_of(payload)
        keys = [*self._index(), self._keys.letter(letter_id), self._keys.pending, self._keys.counts]
        if trace_id:
            keys.append(self._keys.record(trace_id))
        arguments: list[str | bytes | int] = [
            letter_id,
            reason,
            detail,
            trace_id,
            digest,
            deliveries,
            payload,
            self._record_ttl_ms,
            *self._bounds,
            self._keys.record(""),
        ]
        with unavailable_if_down("dead letters"):
            found: Any = self._bury(keys=keys, args=arguments)
        decision, is_over = found
        if decision:
            return Decision.model_validate_json(decision)
        log.warning("trace_dead", trace_id=trace_id, reason=reason, detail=detail)
        self._on_burial(reason)
        if is_over:
            try:
                self._drop_oldest()
            except ServiceUnavailable as error:
                # This submission is kept all the same, and must not be buried again; the next burial makes room.
                log.warning("letters_not_dropped", detail=str(error))
        return None

    def _drop_oldest(self) -> None:
        keys = [*self._index(), self._keys.dropped]
        arguments: list[str | int] = [self._keys.letter(""), self._keys.record(""), _DROPPED_AT_ONCE, *self._bounds]
        count, is_over = 0, True
        while is_over:
            with unavailable_if_down("dead letters"):
                found: Any = self._make_room(keys=keys, args=arguments)
            dropped, is_over = found
            count += dropped
        if count:
            log.warning("letters_dropped", count=count)

    def read(self) -> Iterator[DeadLetter]:
        """Give all dead letters, the one longest not heard of first.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("dead letters"):
            ids: Any = self._client.zrange(self._keys.dead_letters, 0, -1)
        for start in range(0, len(ids), _READ_CHUNK):
            chunk = [letter_id.decode() for letter_id in ids[start : start + _READ_CHUNK]]
            with unavailable_if_down("dead letters"):
                pipeline = self._client.pipeline(transaction=False)
                for letter_id in chunk:
                    key = self._keys.letter(letter_id)
                    pipeline.hmget(key, "reason", "detail", "trace_id", "deliveries", "first_ms", "last_ms", "burials")
                    pipeline.hstrlen(key, "payload")
                replies = iter(pipeline.execute())
            for letter_id, fields, size_bytes in zip(chunk, replies, replies, strict=True):
                # Dropped or expired since the index was read.
                if fields[0] is not None:
                    reason, detail, trace_id = (field.decode() for field in fields[:3])
                    deliveries, first_ms, last_ms, burials = map(int, fields[3:])
                    yield DeadLetter(letter_id, reason, detail, trace_id, deliveries, first_ms, last_ms, burials, size_bytes)

    def payload(self, letter_id: str) -> bytes:
        """Give a dead letter's payload; empty if there is no such letter any more.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("dead letters"):
            found: Any = self._client.hget(self._keys.letter(letter_id), "payload")
        return found or b""

    def drop(self, letter: DeadLetter) -> bool:
        """Remove a dead letter for good, and the record that died with it; return whether it was there.

        One that was buried again since it was read stays.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("dead letters"):
            keys = [*self._index(), self._keys.letter(letter.letter_id)]
            chosen = [letter.burials, letter.last_ms]
            return bool(self._drop(keys=keys, args=[letter.letter_id, self._keys.record(""), *chosen]))

    def _index(self) -> tuple[str, str]:
        return self._keys.dead_letters, self._keys.letter_sizes
