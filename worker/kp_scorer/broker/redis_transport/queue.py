"""A queue in Redis on which a message is never between two places.

Each queue has, beside its list:

    {queue}.taking       list    messages that a blocking take has moved and not noted yet, for an instant each
    {queue}.in_hand      hash    digest to message: taken and neither acknowledged nor given back
    {queue}.index        zset    digest by the time when its holder was last known to be alive, in ms of Redis' clock
    {queue}.deliveries   hash    digest to how often the message was delivered; expires after a day without a delivery
    {queue}.oversized    list    messages too large for a worker to read, whose beginnings went on in their place; expires
                                 30 days after the last. The newest 100, and no more than 64 MiB together unless a single
                                 one is larger; the oldest go first

A message is known by its digest, the SHA-1 of its bytes, which never change on the way back to the queue. Two messages of the
very same bytes are therefore one while both are in hand, which is what they are worth.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kp_scorer.broker.task_body import BEGINNING_BYTES
from kp_scorer.store.keys import KEPT_S
from kp_scorer.store.scripts import lua_source

_ACKNOWLEDGE, _GIVE_BACK, _PUT = (lua_source(__package__, name) for name in ("acknowledge", "give_back", "put"))
_TAKE, _SWEEP = (lua_source(__package__, "oversized", name) for name in ("take", "sweep"))
_KEPT, _WHOLE = (lua_source(__package__, name) for name in ("kept", "whole"))

_SWEPT_AT_ONCE: Final = 1_000

TAKEN_BYTES: Final = 1_048_576
"""How many bytes of messages are taken before the last one: what is taken at once is in memory at once, several times over."""


class Taken(NamedTuple):
    """A message just taken."""

    message: bytes
    digest: bytes
    deliveries: int
    """How often it has been delivered, this time included."""


class RedisQueue:
    """The keys of one queue and what is done to them, each in one step. It holds no connection: each call is given one."""

    def __init__(self, name: str, largest_bytes: int) -> None:
        """Use the queue ``name``; of a message over ``largest_bytes`` only the beginning is delivered."""
        self.name = name
        self.taking, self._in_hand, self._index, self._deliveries, self._oversized = (
            f"{name}.{part}" for part in ("taking", "in_hand", "index", "deliveries", "oversized")
        )
        self._largest_bytes = largest_bytes

    def is_oversized(self, message: bytes) -> bool:
        """Whether only the beginning of a message is delivered."""
        return len(message) > self._largest_bytes

    def take_command(self, most: int, moved: bytes = b"") -> tuple[Any, ...]:
        """The command that takes the next messages, ``most`` of them at most; the first is one ``moved`` to ``taking``, if any.

        Of large messages it takes fewer: none after the first :data:`TAKEN_BYTES`. For its reply see :meth:`parse_taken`.
        """
        keys = (self.name, self.taking, self._in_hand, self._index, self._deliveries, self._oversized)
        return "EVAL", _TAKE, len(keys), *keys, moved, most, TAKEN_BYTES, *self._sizes()

    @staticmethod
    def parse_taken(reply: Any) -> list[Taken]:
        """What was taken, by the reply to a :meth:`take_command`, the first first."""
        return [Taken(*each) for each in reply]

    def take(self, client: Any, most: int, moved: bytes = b"") -> list[Taken]:
        """Take the next messages; see :meth:`take_command`."""
        return self.parse_taken(client.execute_command(*self.take_command(most, moved)))

    def put(self, client: Any, messages: Sequence[str | bytes]) -> None:
        """Put messages on the queue, to be taken last and in this order, even if Redis is full."""
        client.eval(_PUT, 1, self.name, *messages)

    def acknowledge(self, client: Any, digests: Sequence[str]) -> None:
        """Let go of messages for good."""
        client.eval(_ACKNOWLEDGE, 3, self._in_hand, self._index, self._deliveries, *digests)

    def give_back(self, client: Any, digest: str, *, taken_next: bool, tried: bool = True) -> None:
        """Put a message back on the queue, to be taken next or last; nothing happens if it is no longer in hand.

        This delivery does not count unless it was ``tried`` to do something with the message.
        """
        keys = (self.name, self._in_hand, self._index, self._deliveries)
        client.eval(_GIVE_BACK, len(keys), *keys, digest, "RPUSH" if taken_next else "LPUSH", int(tried))

    def sweep(self, client: Any, visibility_timeout_ms: int, priorities: Sequence[str], held: Sequence[str]) -> None:
        """Renew what is ``held``, and give back what others have not renewed within the visibility timeout.

        Messages in the lists ``priorities``, where kombu puts those of other priorities, join the queue.
        """
        keys = [self.name, self.taking, self._in_hand, self._index, self._oversized, *priorities]
        client.eval(_SWEEP, len(keys), *keys, visibility_timeout_ms, _SWEPT_AT_ONCE, *self._sizes(), *held)

    def count_oversized(self, client: Any) -> int:
        """How many messages are kept that were too large to be delivered whole."""
        return int(client.llen(self._oversized))

    def oversized(self, client: Any) -> list[tuple[bytes, int]]:
        """What was delivered of each of them, and its size in bytes, the oldest first."""
        found = iter(client.eval(_KEPT, 1, self._oversized, BEGINNING_BYTES))
        return list(zip(found, found, strict=True))

    def whole(self, client: Any, beginning: bytes) -> bytes | None:
        """The newest of them of which this beginning was delivered, if it is still kept."""
        found: bytes | None = client.eval(_WHOLE, 1, self._oversized, beginning, 0)
        return found

    def remove_oversized(self, client: Any, beginning: bytes) -> None:
        """Keep none of them any longer of which this beginning was delivered."""
        client.eval(_WHOLE, 1, self._oversized, beginning, 1)

    def _sizes(self) -> tuple[int, int, int]:
        return self._largest_bytes, BEGINNING_BYTES, KEPT_S
