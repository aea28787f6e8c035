"""What must hold of the books after every step, read from Redis alone: the model has no say in it."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from kp_scorer.decision import Decision

from tests.model.baton import Violation
from tests.model.compare import pairs
from tests.model.contents import IDS, letter_id_of
from tests.model.patched_scripts import DEADLINES_KEY
from tests.model.records import KEYS
from tests.model.reference_log import LOG

HasMessage = Callable[[str, bytes], bool]
"""Whether a message with the content of this digest is on its way, or in flight, under an id."""

_PENDING_ONLY: Final = ("since_ms", "submission", "resends", "owner", "lease_ms", "attempts")


class Invariants:
    """Looks at one dump after the other, and remembers what must not change between them."""

    def __init__(self) -> None:
        self._decisions: dict[str, bytes] = {}
        self._attempts: dict[str, tuple[int, bytes]] = {}
        self._workers: dict[bytes, float] = {}

    def came_back(self) -> None:
        """Redis is back from an older state: what was decided since may be decided otherwise now."""
        self._decisions.clear()
        self._attempts.clear()
        self._workers.clear()

    def check(self, dump: dict[str, Any], now: int, has_message: HasMessage) -> None:
        """Raise a violation if anything does not hold."""
        broken = list(self._broken(_Dump(dump), now, has_message))
        if broken:
            raise Violation("; ".join(broken))

    def _broken(self, dump: "_Dump", now: int, has_message: HasMessage) -> Iterator[str]:
        states = [record.get("state", b"") for record in dump.records.values()]
        submitted, decided, dead = (int(dump.counts.get(name, 0)) for name in ("submitted", "decided", "dead"))
        if submitted != len(dump.pending) + decided + dead or min(submitted, decided, dead) < 0:
            yield f"counts: {submitted} submitted, {len(dump.pending)} pending, {decided} decided, {dead} dead"
        if set(dump.pending) != {id_ for id_, record in dump.records.items() if record.get("state") == b"pending"}:
            yield f"index of pending: {sorted(dump.pending)}, but the states are {states}"
        # Whoever is decided stays so until the record is gone.
        self._decisions = {id_: decision for id_, decision in self._decisions.items() if id_ in dump.records}
        for trace_id, record in dump.records.items():
            if record.get("decision") != self._decisions.get(trace_id, record.get("decision")):
                yield f"{trace_id}: its decision has changed"
            for problem in (*self._of_state(dump, trace_id, record), *self._of_attempts(trace_id, record, now)):
                yield f"{trace_id}: {problem}"
            if record.get("state") == b"pending" and not (
                "submission" in record
                or has_message(trace_id, record["digest"])
                or dump.workers.get(record.get("owner", b""), 0) > now
            ):
                yield f"{trace_id}: pending, and nothing will bring it back"
        self._workers = dump.workers

    def _of_state(self, dump: "_Dump", trace_id: str, record: dict[str, bytes]) -> Iterator[str]:
        state = record.get("state", b"")
        if (KEYS.record(trace_id) in dump.deadlines) == (state == b"pending"):
            yield f"is {state!r} and {'expires' if state == b'pending' else 'never expires'}"
        if state != b"pending" and any(name in record for name in _PENDING_ONLY):
            yield f"is {state!r} and has {sorted(record)}"
        if state == b"dead":
            if "decision" in record:
                yield "is dead and decided"
            letter = dump.letters.get(record["letter"].decode())
            if letter is None or letter_id_of(letter["payload"]).encode() != record["letter"]:
                yield "is dead of a letter that cannot be read"
        elif any(name in record for name in ("reason", "detail", "letter")):
            yield f"is {state!r} and has {sorted(record)}"
        if state == b"decided":
            yield from self._of_decision(dump, trace_id, record)
        elif "decision" in record:
            yield f"is {state!r} and has a decision"

    def _of_decision(self, dump: "_Dump", trace_id: str, record: dict[str, bytes]) -> Iterator[str]:
        raw = record["decision"]
        self._decisions[trace_id] = raw
        place = Decision.model_validate_json(raw).novelty.entry or ""
        if "entry" in record and record["entry"].decode() != place:
            yield f"its decision rests on {place}, its record says {record['entry'].decode()}"
        entry = dump.log.get(place)
        if entry and entry != (trace_id.encode(), record["digest"]):
            yield f"its decision rests on {place}, where there is another content"

    def _of_attempts(self, trace_id: str, record: dict[str, bytes], now: int) -> Iterator[str]:
        before, owner = self._attempts.get(trace_id, (0, b""))
        attempts = int(record.get("attempts", 0))
        if attempts > before and self._workers.get(owner, 0) > now:
            yield "an attempt was charged while its worker lives"
        self._attempts[trace_id] = attempts, record.get("owner", b"")


class _Dump:
    def __init__(self, dump: dict[str, Any]) -> None:
        self.records = {id_: _fields(dump[KEYS.record(id_)]) for id_ in IDS if KEYS.record(id_) in dump}
        letters = {
            key.removeprefix(KEYS.dead_letter("")): content
            for key, content in dump.items()
            if key.startswith(KEYS.dead_letter(""))
        }
        self.letters = {letter_id: _fields(content) for letter_id, content in letters.items()}
        self.pending = {member.decode(): float(score) for member, score in pairs(dump.get(KEYS.pending, []))}
        self.workers = {member: float(score) for member, score in pairs(dump.get(KEYS.workers, []))}
        self.deadlines = {member.decode() for member, _ in pairs(dump.get(DEADLINES_KEY, []))}
        self.counts = _fields(dump.get(KEYS.counts, []))
        self.log = {place.decode(): (fields[1], fields[3]) for place, fields in dump.get(LOG, [])}


def _fields(content: Any) -> dict[str, bytes]:
    return {name.decode(): value for name, value in pairs(content)}
