"""Compares what Redis holds with the model, field by field."""

from collections.abc import Mapping
from typing import Any, Final

from tests.model.baton import Violation
from tests.model.contents import vector_of
from tests.model.patched_scripts import DEADLINES_KEY
from tests.model.records import KEYS, Letter, TraceRecord, key_of
from tests.model.reference import Reference
from tests.model.reference_facts import FACTS, KEPT_FACTS, Entry
from tests.model.reference_log import ERASED, HEAD, LOG, WINDOW, LogModel
from tests.model.server import Dump

_SOME: Final = b"some"
"""A value that stands for the place of any fact, because the specification leaves these places open."""


def check_same(dump: Dump, model: Reference) -> None:
    """Raise a violation if Redis holds anything but what the model expects."""
    expected = _expected(model)
    stored = {key: readable for key, content in dump.items() if (readable := _readable(key, content))}
    if stored == expected:
        return
    differences = []
    for key in sorted(stored.keys() | expected.keys()):
        in_redis, specified = stored.get(key), expected.get(key)
        if in_redis != specified:
            differences.append(
                f"{key}: Redis {_differing(in_redis, specified)}, the specification {_differing(specified, in_redis)}"
            )
    raise Violation("\n".join(differences))


def _expected(model: Reference) -> dict[str, object]:
    expected: dict[str, object] = {KEYS.record(trace_id): _record(record) for trace_id, record in model.records.items()}
    expected |= {key_of(kind): index for kind, index in model.kinds.items() if index}
    expected |= model.reports
    expected |= {KEYS.dead_letter(letter_id): _letter(letter) for letter_id, letter in model.letters.items()}
    of_all: dict[str, object] = {
        KEYS.pending: model.pending,
        KEYS.workers: model.workers,
        KEYS.dead_letters: model.letter_index,
        KEYS.dead_letter_sizes: _fields(
            {each: f"{size} {kind}" for each, (size, kind) in model.letter_sizes.items()} | model.bytes_of_kinds()
        ),
        KEYS.dropped: model.dropped,
        KEYS.counts: _counts(
            {"submitted": model.submitted, "decided": model.decided, "dead": model.dead, **model.dead_lettered}
        ),
        KEYS.tallies: _counts(model.tallies),
        KEYS.drained: model.drained,
        DEADLINES_KEY: model.deadlines,
        **_log(model.log),
        FACTS: [entry for _, entry in model.facts.stored],
        KEPT_FACTS: [entry for _, entry in model.facts.kept_facts],
    }
    return expected | {key: content for key, content in of_all.items() if content}


def _record(record: TraceRecord) -> dict[str, bytes]:
    # A dead record always has the field of its detail, even if that is empty.
    is_dead = record.state == "dead"
    fields = _fields({name: value for name, value in vars(record).items() if value or (is_dead and name == "detail")})
    return fields | dict.fromkeys(fields.keys() & {"fact"}, _SOME)


def _letter(letter: Letter) -> dict[str, bytes]:
    return _fields({name: value for name, value in vars(letter).items() if name != "serial"})


def _fields(values: Mapping[str, object]) -> dict[str, bytes]:
    """Return the fields of a hash in the form in which Redis returns them."""
    return {name: value if isinstance(value, bytes) else str(value).encode() for name, value in values.items()}


def _counts(counted: Mapping[str, int | bytes]) -> dict[str, int]:
    """Return counts without zeros, as a count of 0 and a missing one mean the same."""
    return {name: int(count) for name, count in counted.items() if int(count)}


def _log(log: LogModel) -> dict[str, object]:
    head = {"epoch": log.epoch, "time_ms": log.time_ms, "place": log.number, "window": WINDOW} if log.epoch else {}
    entries = [
        (
            *(entry.place, entry.trace_id, entry.digest, vector_of(entry.digest).tobytes()),
            [*([] if entry.counts else [b"c", b"0"]), *([b"vd", entry.visible] if entry.visible else [])],
        )
        for entry in log.present()
    ]
    return {LOG: entries, ERASED: log.erasures, HEAD: _fields(head)}


def _readable(key: str, content: Any) -> object:
    if key == LOG:
        return [(place.decode(), fields[1].decode(), fields[3], fields[5], fields[6:]) for place, fields in content]
    if key == ERASED:
        return [fields[1].decode() for _, fields in content]
    if key in (FACTS, KEPT_FACTS):
        return [_entry(dict(zip(fields[::2], fields[1::2], strict=True))) for _, fields in content]
    if key == KEYS.drained:
        return int(content)
    if key in (KEYS.counts, KEYS.tallies, KEYS.dropped):
        return _counts(content)
    if key.startswith(KEYS.record("")):
        # An absent count of attempts or resends means the same as a count of 0.
        return {name: _SOME if name == "fact" else value for name, value in content.items() if value != b"0"}
    return content


def _entry(fields: Mapping[bytes, bytes]) -> Entry:
    is_note = b"r" in fields or b"e" in fields
    return Entry(fields.get(b"i", b"").decode(), fields.get(b"d", b"").decode(), fields.get(b"f", b""), is_note)


def _differing(own: object, counterpart: object) -> str:
    if isinstance(own, dict) and isinstance(counterpart, dict):
        return str({name: value for name, value in own.items() if counterpart.get(name) != value})
    return str(own)
