"""The directory of novelty logs, facts and pinned sets, so that listing them need not scan the names of all keys."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import redis

from kp_scorer.store.keys import Keys
from kp_scorer.store.records import text_in

_ALL: Final = b"all"
_KEPT_S: Final = 86_400
SCANNED_AT_ONCE: Final = 2_000  # Scanning this many names takes Redis a millisecond or two, during which it does nothing else.


def listed_keys(client: redis.Redis, keys: Keys) -> list[str]:
    """Return the keys of all novelty logs, facts and pinned sets, sorted; some may be gone.

    If the directory has expired, or does not exist yet, this scans the names of all keys.
    """
    listed: Any = client.hgetall(keys.directory)
    if _ALL not in listed:
        kinds = {keys.any_log: "stream", keys.any_facts: "stream", keys.any_pinned_set: "hash"}
        listed = [key for each, kind in kinds.items() for key in client.scan_iter(each, SCANNED_AT_ONCE, _type=kind)]
        # A full Redis refuses this, and the next command scans again.
        with client.pipeline(transaction=False) as step, suppress(redis.exceptions.ResponseError):
            list_keys(step, keys, [*listed, _ALL])
            step.execute()
    return sorted(text_in(key) for key in listed if key != _ALL)


def list_keys(step: "redis.client.Pipeline", keys: Keys, added: Iterable[bytes | str]) -> None:
    """Add keys to the directory in this step. Logs and facts are added by the scripts that append them."""
    step.hset(keys.directory, mapping=dict.fromkeys(added, 1))
    step.expire(keys.directory, _KEPT_S)
