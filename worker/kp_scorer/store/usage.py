"""Estimates the bytes that each part of the scorer takes in Redis, from a sample of bounded size."""

from collections.abc import Callable, Iterable, Sequence
from random import sample
from typing import Any, Final

import redis

from kp_scorer.store.connection import in_one_trip
from kp_scorer.store.decision_stream import bytes_in
from kp_scorer.store.keys import FactKeys, KeptFactKeys, Keys

_SCANNED: Final = 1_000  # Every worker measures every ten seconds, so a measurement may take Redis no more than some 3 ms.
_MEASURED: Final = 100
_ITEMS: Final = 50  # Redis estimates the size of a key from this many of its fields.


def used_by_part(client: redis.Redis, keys: Keys, spaces: Iterable[str], pinned: Sequence[str]) -> dict[str, int]:
    """Return the bytes of records, of novelty logs with facts and pinned sets, of dead letters, and of the spans of runs.

    Only the logs of these ``spaces`` and their ``pinned`` sets are measured. The result is empty if this user may not scan.
    """
    indices = (keys.pending, keys.dead_letters, keys.runs, keys.runs_kept)
    pending, letters, *runs = in_one_trip(client, (("ZCARD", index) for index in indices))
    try:
        size: Any = client.dbsize()
        reply: Any = client.scan(count=_SCANNED)
    except redis.exceptions.NoPermissionError:
        return {}
    # The index counts the dead letters exactly, so the sample need only say which part of the other keys is records.
    others = [name for name in reply[1] if not name.startswith(keys.dead_letter_prefix.encode())]
    records = [name for name in others if name.startswith(keys.record_prefix.encode())]
    record_count = (size - letters) * len(records) / max(1, len(others))
    ended = _ended(client, keys, records)
    compared = [key for space in spaces for key in _compared(keys, space, pinned)]
    of_letters = (keys.dead_letters, keys.dead_letter_sizes, keys.dead_junk, keys.dead_rest)
    return {
        "records": _sampled(client, ended, max(0.0, record_count - pending))
        + _indexed(client, keys.pending, pending, keys.record)
        + bytes_in(client, keys.pending),
        "log": sum(bytes_in(client, key) for key in [*compared, keys.copies]),
        "dead_letters": _indexed(client, keys.dead_letters, letters, keys.dead_letter)
        + sum(bytes_in(client, key) for key in of_letters),
        "runs": sum(
            _indexed(client, index, count, keys.run) + bytes_in(client, index)
            for index, count in zip((keys.runs, keys.runs_kept), runs, strict=True)
        ),
    }


def _compared(keys: Keys, space: str, pinned: Sequence[str]) -> list[str]:
    log, facts = keys.of_log(space), keys.of_facts(space)
    streams = [log.log, log.head, log.erasures, FactKeys(facts).log, KeptFactKeys(facts).log]
    return [*streams, *(keys.pinned_set(space, name) for name in pinned)]


def _ended(client: redis.Redis, keys: Keys, records: Sequence[bytes]) -> list[bytes]:
    """Return those of the first records whose traces are not pending; pending ones hold a text and are measured apart."""
    some = records[:_MEASURED]
    sent = in_one_trip(client, (("ZSCORE", keys.pending, name[len(keys.record_prefix) :]) for name in some))
    return [name for name, sent_ms in zip(some, sent, strict=True) if sent_ms is None]


def _indexed(client: redis.Redis, index: str, count: int, key_of: Callable[[str], str]) -> int:
    """Return the bytes of the keys of all ids in an index, estimated from a random sample."""
    places = sample(range(count), min(count, _MEASURED))
    ids_at = in_one_trip(client, (("ZRANGE", index, place, place) for place in places))
    drawn = [key_of("").encode() + each for ids in ids_at for each in ids]
    return _sampled(client, drawn, count)


def _sampled(client: redis.Redis, names: Sequence[bytes], count: float) -> int:
    """Return the bytes of ``count`` keys that take as much as these on average."""
    sizes = list(filter(None, in_one_trip(client, (("MEMORY USAGE", name, "SAMPLES", _ITEMS) for name in names))))
    return int(count * sum(sizes) / max(1, len(sizes)))
