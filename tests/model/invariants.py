"""The invariants that hold after every step. They are read from Redis alone, independently of the model."""

from collections.abc import Callable, Iterator
from typing import Final

from kp_scorer.decision import Decision

from tests.model.baton import Violation
from tests.model.contents import IDS, OUTCOME_IDS, letter_id_of
from tests.model.patched_scripts import DEADLINES_KEY
from tests.model.records import KEYS
from tests.model.reference_log import LOG
from tests.model.server import Dump

HasMessage = Callable[[str, bytes], bool]
"""Returns whether a message with this id and with content of this digest is on the queue or in flight."""

_PENDING_ONLY: Final = ("since_ms", "submission", "resends", "owner", "held_until_ms", "attempts")


class Invariants:
    """Checks one dump after another, and remembers what must not change between them."""

    def __init__(self) -> None:
        self._decisions: dict[str, bytes] = {}
        self._attempts: dict[str, tuple[int, str]] = {}
        self._workers: dict[str, int] = {}

    def check(self, dump: Dump, now: int, has_message: HasMessage) -> None:
        broken = list(self._broken(_Books(dump), now, has_message))
        if broken:
            raise Violation("; ".join(broken))

    def _broken(self, books: "_Books", now: int, has_message: HasMessage) -> Iterator[str]:
        states = [record.get("state", b"") for record in books.records.values()]
        submitted, decided, dead = (int(books.counts.get(name, 0)) for name in ("submitted", "decided", "dead"))
        if submitted != len(books.pending) + decided + dead or min(submitted, decided, dead) < 0:
            yield f"counts: {submitted} submitted, {len(books.pending)} pending, {decided} decided, {dead} dead"
        if set(books.pending) != {id_ for id_, record in books.records.items() if record.get("state") == b"pending"}:
            yield f"index of pending: {sorted(books.pending)}, but the states are {states}"
        # A decided trace stays decided until its record is gone.
        self._decisions = {id_: decision for id_, decision in self._decisions.items() if id_ in books.records}
        for trace_id, record in books.records.items():
            if record.get("decision") != self._decisions.get(trace_id, record.get("decision")):
                yield f"{trace_id}: its decision has changed"
            for problem in (*self._of_state(books, trace_id, record), *self._of_attempts(trace_id, record, now)):
                yield f"{trace_id}: {problem}"
            if record.get("state") == b"pending" and not (
                "submission" in record
                or has_message(trace_id, record["digest"])
                or books.workers.get(record.get("owner", b"").decode(), 0) > now
            ):
                yield f"{trace_id}: pending, and nothing will bring it back"
        self._workers = books.workers

    def _of_state(self, books: "_Books", trace_id: str, record: dict[str, bytes]) -> Iterator[str]:
        state = record.get("state", b"")
        if (KEYS.record(trace_id) in books.deadlines) == (state == b"pending"):
            yield f"is {state!r} and {'expires' if state == b'pending' else 'never expires'}"
        if state != b"pending" and any(name in record for name in _PENDING_ONLY):
            yield f"is {state!r} and has {sorted(record)}"
        if state == b"dead":
            if "decision" in record:
                yield "is dead and decided"
            letter = books.letters.get(record["letter"].decode())
            if letter is None or letter_id_of(letter["payload"]).encode() != record["letter"]:
                yield "is dead of a letter that cannot be read"
        elif any(name in record for name in ("reason", "detail", "letter")):
            yield f"is {state!r} and has {sorted(record)}"
        if state == b"decided":
            yield from self._of_decision(books, trace_id, record)
        elif "decision" in record:
            yield f"is {state!r} and has a decision"

    def _of_decision(self, books: "_Books", trace_id: str, record: dict[str, bytes]) -> Iterator[str]:
        raw = record["decision"]
        self._decisions[trace_id] = raw
        place = Decision.model_validate_json(raw).novelty.entry or ""
        if "entry" in record and record["entry"].decode() != place:
            yield f"its decision rests on {place}, its record says {record['entry'].decode()}"
        entry = books.log.get(place) if trace_id in IDS else None
        if entry and entry != (trace_id.encode(), record["digest"]):
            yield f"its decision rests on {place}, where there is another content"

    def _of_attempts(self, trace_id: str, record: dict[str, bytes], now: int) -> Iterator[str]:
        before, owner = self._attempts.get(trace_id, (0, ""))
        attempts = int(record.get("attempts", 0))
        if attempts > before and self._workers.get(owner, 0) > now:
            yield "an attempt was charged while its worker lives"
        self._attempts[trace_id] = attempts, record.get("owner", b"").decode()


class _Books:
    def __init__(self, dump: Dump) -> None:
        letters = KEYS.dead_letter("")
        self.records: dict[str, dict[str, bytes]] = {
            id_: dump[KEYS.record(id_)] for id_ in (*IDS, *OUTCOME_IDS) if KEYS.record(id_) in dump
        }
        self.letters = {key.removeprefix(letters): content for key, content in dump.items() if key.startswith(letters)}
        self.pending = dump.get(KEYS.pending, {})
        self.workers: dict[str, int] = dump.get(KEYS.workers, {})
        self.deadlines = dump.get(DEADLINES_KEY, {})
        self.counts = dump.get(KEYS.counts, {})
        self.log = {place.decode(): (fields[1], fields[3]) for place, fields in dump.get(LOG, [])}
