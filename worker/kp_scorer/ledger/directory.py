"""Where novelty logs and pinned sets are, so that nobody looks through the names of all keys to list them."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import redis

from kp_scorer.ledger.keys import Keys
from kp_scorer.ledger.records import text_in

_ALL: Final = b"all"
_KEPT_S: Final = 86_400
SCANNED_AT_ONCE: Final = 2_000
"""Names of keys; Redis does nothing else meanwhile, for a millisecond or two."""


def listed_keys(client: redis.Redis, keys: Keys) -> list[str]:
    """The keys of all novelty logs and pinned sets, in order; some may be gone.

    This looks through the names of all keys where the directory has expired, or is not there yet.
    """
    listed: Any = client.hgetall(keys.directory)
    if _ALL not in listed:
        kinds = {keys.any_log: "stream", keys.any_pinned_set: "hash"}
        listed = [key for each, kind in kinds.items() for key in client.scan_iter(each, SCANNED_AT_ONCE, _type=kind)]
        # A full Redis takes none, and the next command looks again.
        with client.pipeline(transaction=False) as step, suppress(redis.exceptions.ResponseError):
            list_keys(step, keys, [*listed, _ALL])
            step.execute()
    return sorted(text_in(key) for key in listed if key != _ALL)


def list_keys(step: "redis.client.Pipeline", keys: Keys, added: Iterable[bytes | str]) -> None:
    """Add keys in this step, as the script that appends adds that of a log."""
    step.hset(keys.directory, mapping=dict.fromkeys(added, 1))
    step.expire(keys.directory, _KEPT_S)
