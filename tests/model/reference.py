"""The specification of the ledger, as plain Python: what each event does to the books, a branch for each cell of its table.

A record here has the fields that lie in Redis, so that the two can be compared.
"""

import copy
from collections import Counter
from collections.abc import Sequence

from kp_scorer.errors import Reason
from kp_scorer.store import Committed, Death, Identity, Record, Refusal, Standing, State, Tally, Verdict

from tests.model.contents import letter_id_of
from tests.model.patched_scripts import MOST_NAMES
from tests.model.records import (
    KEPT_MS,
    KEYS,
    LEDGER,
    RECORD_TTL_MS,
    RESEND_AFTER_MS,
    TRACE_LEASE_MS,
    WORKER_LEASE_MS,
    WORKERS_REMEMBERED_MS,
    Letter,
    TraceRecord,
)
from tests.model.reference_log import LogModel


class Reference:
    """The books as they should be."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000
        self.records: dict[str, TraceRecord] = {}
        self.pending: dict[str, int] = {}
        self.submitted = self.decided = self.dead = 0
        self.tallies = Counter[str]()
        self.compared: dict[str, Counter[str]] = {}
        self.letters: dict[str, Letter] = {}
        self.letter_index: dict[str, int] = {}
        self.letter_sizes: dict[str, int] = {}
        self.dropped = 0
        self.workers: dict[str, int] = {}
        self.drained: int | None = None
        self.log = LogModel()
        self.deadlines: dict[str, int] = {}
        self.burials = 0
        self.cells: Counter[str] = Counter()
        """How often each event has met each state: which cells of the table were tried."""

    def snapshot(self) -> "Reference":
        """A copy of everything."""
        copied = copy.deepcopy(self)
        copied.cells = self.cells
        return copied

    def meets(self, event: str, record: TraceRecord, digest: bytes) -> None:
        """Count a cell of the table."""
        state = record.state or "none"
        same = "" if state == "none" else ", same" if record.digest == digest else ", other" if record.digest else ", no digest"
        self.cells[f"{event} {state}{same if digest else ', undecodable'}"] += 1

    # Lives. What may expire does so at its deadline, and not before.

    def expires_in(self, key: str, ttl_ms: int) -> None:
        self.deadlines[key] = self.now + ttl_ms

    def due(self) -> list[str]:
        """Forget, and name, every key whose time has come."""
        names = sorted(key for key, deadline in self.deadlines.items() if deadline <= self.now)
        for name in names:
            self.lose(name)
        return names

    def lose(self, key: str) -> None:
        """A key is gone."""
        self.deadlines.pop(key, None)
        self.compared.pop(key, None)
        for trace_id in [trace_id for trace_id in self.records if KEYS.record(trace_id) == key]:
            del self.records[trace_id]
        for letter_id in [letter_id for letter_id in self.letters if KEYS.letter(letter_id) == key]:
            del self.letters[letter_id]
        if key == KEYS.dead_letters:
            self.letter_index.clear()
        elif key == KEYS.letter_sizes:
            self.letter_sizes.clear()
        elif key == KEYS.workers:
            self.workers.clear()
        elif key == KEYS.drained:
            self.drained = None
        else:
            self.log.lose(key)

    # Submitting and deciding.

    def open(self, trace_id: str, digest: bytes, submission: bytes) -> str:
        record = self.records.setdefault(trace_id, TraceRecord())
        self.meets("open", record, digest)
        if record.state in ("pending", "decided") and record.digest != digest:
            return "conflict"
        if record.state == "decided":
            return "decided"
        if record.state != "pending":
            self._to_pending(trace_id, record, digest)
        record.submission, record.as_letter = submission, digest + letter_id_of(submission).encode()
        self.pending[trace_id] = self.now
        return "pending"

    def begin(self, worker: str, identities: Sequence[Identity], *, alone: bool) -> list[Record]:
        self._is_heard(worker)
        return [self._begin(worker, *identity, alone=alone) for identity in identities]

    def _begin(self, worker: str, trace_id: str, digest: bytes, *, alone: bool) -> Record:
        record = self.records.setdefault(trace_id, TraceRecord())
        is_held = False
        self.meets("begin", record, digest)
        if not record.state or (record.state == "dead" and record.digest != digest):
            self._to_pending(trace_id, record, digest)
        if record.state == "pending" and record.digest == digest:
            if record.owner not in ("", worker):
                if self.is_alive(record.owner):
                    is_held = record.lease_ms > self.now
                else:
                    record.attempts += 1
                    record.let_go()
            if not is_held and (alone or not record.attempts):
                record.owner, record.lease_ms = worker, self.now + TRACE_LEASE_MS
        state: State = "pending" if record.state == "pending" else "decided" if record.state == "decided" else "dead"
        reason: Reason | None = record.reason or None  # type: ignore[assignment]
        return Record(state, record.digest, record.decision, reason, record.detail, record.attempts, is_held)

    def release(self, worker: str, trace_ids: Sequence[str]) -> None:
        for trace_id in trace_ids:
            record = self.records.get(trace_id)
            if record and record.owner == worker:
                record.let_go(self.now)

    def renew(self, worker: str, deciding: Sequence[str]) -> None:
        for other in [other for other, until_ms in self.workers.items() if until_ms <= self.now - WORKERS_REMEMBERED_MS]:
            del self.workers[other]
        self._is_heard(worker)
        for trace_id in deciding:
            record = self.records.get(trace_id)
            if record and record.owner == worker:
                record.lease_ms = self.now + TRACE_LEASE_MS

    def _is_heard(self, worker: str) -> None:
        self.workers[worker] = self.now + WORKER_LEASE_MS
        self.expires_in(KEYS.workers, WORKERS_REMEMBERED_MS)

    def is_alive(self, worker: str) -> bool:
        return self.workers.get(worker, 0) > self.now

    def commit(self, verdict: Verdict, comparison: str) -> Committed:
        record = self.record(verdict.trace_id)
        self.meets("commit", record, verdict.digest)
        # What is dead without a digest is another submission than any that could be decided.
        if (record.state or record.digest) and record.digest != verdict.digest:
            return Refusal.CONFLICT
        if record.state == "decided":
            return Standing(record.decision, is_own=False)
        if record.state == "dead":
            return Death(record.reason, record.detail)  # type: ignore[arg-type]
        if verdict.entry and record.entry != verdict.entry:
            return Refusal.AGAIN
        self.records[verdict.trace_id] = record
        if record.state != "pending":
            self._to_pending(verdict.trace_id, record, verdict.digest)
        self._end_pending(verdict.trace_id, record)
        record.state, record.decision = "decided", verdict.decision
        self.decided += 1
        self._count(verdict.tally, comparison)
        return Standing(verdict.decision, is_own=True)

    def _count(self, tally: Tally, comparison: str) -> None:
        name = tally.domain
        if not tally.is_known and f"decided {name}" not in self.tallies:
            # Who comes after so many others has no name.
            name = name if self.tallies["names"] < MOST_NAMES else ""
            self.tallies["names"] += bool(name)
        self.tallies[f"decided {name}"] += 1
        if tally.outcomes:
            key = KEYS.compared(comparison)
            self.compared.setdefault(key, Counter())[f"{tally.outcomes} {name}"] += 1
            self.expires_in(key, KEPT_MS)

    # Dead letters.

    def bury(self, payload: bytes, reason: str, detail: str, trace_id: str, digest: bytes, deliveries: int) -> bytes:
        """Give the decision of this very submission if there is one; else keep a letter and give nothing."""
        record = self.record(trace_id) if trace_id else None
        if record:
            self.meets(f"bury {reason}", record, digest)
        as_letter = letter_id_of(payload).encode()
        is_same = record is not None and bool(
            (digest and record.digest == digest) or record.as_letter == record.digest + as_letter
        )
        if record and record.state == "decided" and is_same:
            return record.decision
        letter_id = letter_id_of(payload)
        named = self.letters[letter_id].trace_id if letter_id in self.letters else ""
        if named not in ("", trace_id):
            if digest or is_same:
                # Now it is known whose bytes they are. What died of them by the other name did so by mistake.
                self._forget_dead(named, letter_id)
            else:
                # Bytes without a name came under another one first; their letter speaks for that one's record.
                record, trace_id = None, named
        is_new = self._keep_letter(letter_id, payload, reason, detail, trace_id, deliveries)
        ends_pending = record is not None and record.state == "pending" and is_same
        self.submitted += is_new and not ends_pending
        self.dead += is_new or ends_pending
        if record and (record.state in ("", "dead") or ends_pending):
            self.records[trace_id] = record
            # Whoever was dead by the same name stays the same unless another content has taken its place.
            if record.digest != digest and (digest or not record.state):
                record.give_up_place()
                record.digest = digest
            self._end_pending(trace_id, record)
            record.state, record.reason, record.detail, record.letter = "dead", reason, detail, letter_id
        return b""

    def _keep_letter(self, letter_id: str, payload: bytes, reason: str, detail: str, trace_id: str, deliveries: int) -> bool:
        old = self.letters.get(letter_id)
        first_ms, burials = (old.first_ms, old.burials + 1) if old else (self.now, 1)
        self.burials += 1
        self.letters[letter_id] = Letter(
            payload, reason, detail, trace_id, deliveries, first_ms, self.now, burials, self.burials
        )
        self.expires_in(KEYS.letter(letter_id), KEPT_MS)
        self.letter_index[letter_id] = self.now
        self.letter_sizes[letter_id] = len(payload)
        self.expires_in(KEYS.dead_letters, KEPT_MS)
        self.expires_in(KEYS.letter_sizes, KEPT_MS)
        return old is None

    def is_over(self) -> bool:
        """Whether there are letters whose time is over, or too many, or too large ones."""
        return self._next_to_go() is not None

    def _next_to_go(self) -> str | None:
        letter_id = min(self.letter_index, key=lambda letter_id: (self.letter_index[letter_id], letter_id), default=None)
        sizes = self.letter_sizes.values()
        is_too_much = len(sizes) > LEDGER.max_dead_letters or sum(sizes) > LEDGER.max_dead_letter_bytes
        if letter_id and (self.letter_index[letter_id] <= self.now - KEPT_MS or (is_too_much and len(sizes) > 1)):
            return letter_id
        return None

    def make_room(self) -> int:
        """Remove the oldest letters until all is within bounds; give how many went before their time."""
        dropped = 0
        while letter_id := self._next_to_go():
            dropped += self.letter_index[letter_id] > self.now - KEPT_MS
            self._remove_letter(letter_id)
        self.dropped += dropped
        return dropped

    def drop(self, letter_id: str, serial: int) -> bool:
        """Drop a letter unless it was buried since that burial."""
        letter = self.letters.get(letter_id)
        if letter is None or letter.serial != serial:
            return False
        self._remove_letter(letter_id)
        return True

    def _remove_letter(self, letter_id: str) -> None:
        trace_id = self.letters[letter_id].trace_id if letter_id in self.letters else ""
        self.lose(KEYS.letter(letter_id))
        del self.letter_index[letter_id], self.letter_sizes[letter_id]
        if not self.letter_index:
            self.lose(KEYS.dead_letters)
        self._forget_dead(trace_id, letter_id)

    def _forget_dead(self, trace_id: str, letter_id: str) -> None:
        record = self.records.get(trace_id)
        if record and record.state == "dead" and record.letter == letter_id:
            self.lose(KEYS.record(trace_id))

    # What brings lost messages back, and what erases.

    def claim(self, *, queue_is_empty: bool) -> list[tuple[str, bytes, int]]:
        if queue_is_empty:
            self.drained = self.now
            self.expires_in(KEYS.drained, KEPT_MS)
        before = min(self.drained or 0, self.now - RESEND_AFTER_MS)
        claimed = []
        for sent_ms, trace_id in sorted((sent_ms, trace_id) for trace_id, sent_ms in self.pending.items()):
            if sent_ms >= before:
                continue
            record = self.records[trace_id]
            is_in_hand = record.lease_ms > self.now - RESEND_AFTER_MS
            if not is_in_hand and not record.submission and self.now - record.since_ms >= KEPT_MS:
                self._forget_pending(trace_id)
                continue
            self.pending[trace_id] = min(self.now, record.lease_ms) if is_in_hand else self.now
            if not is_in_hand and record.submission:
                claimed.append((trace_id, record.submission, record.resends))
        return claimed

    def resent(self, trace_id: str) -> None:
        if trace_id in self.pending:
            self.pending[trace_id] = self.now
            self.records[trace_id].resends += 1

    def erase_entries(self, trace_id: str, places: Sequence[str]) -> int:
        record = self.records.get(trace_id)
        if record:
            record.epoch = record.entry = ""
            record.given_up.clear()
        return self.log.erase(places, self)

    def erase_record(self, trace_id: str) -> int:
        if trace_id in self.pending:
            self._forget_pending(trace_id)
            return 1
        found = trace_id in self.records
        self.lose(KEYS.record(trace_id))
        return int(found)

    def record(self, trace_id: str) -> TraceRecord:
        """The record of a trace; one without anything if there is none."""
        return self.records.get(trace_id, TraceRecord())

    def keep_place(self, trace_id: str, record: TraceRecord) -> None:
        """A trace's place is noted in its record."""
        self.records[trace_id] = record
        if not record.state:
            self.expires_in(KEYS.record(trace_id), RECORD_TTL_MS)

    # Steps that several events have in common.

    def _to_pending(self, trace_id: str, record: TraceRecord, digest: bytes) -> None:
        if record.digest != digest:
            record.give_up_place()
        record.forget_pending()
        record.state, record.digest, record.since_ms = "pending", digest, self.now
        record.decision, record.reason, record.detail, record.letter, record.as_letter = b"", "", "", "", b""
        self.deadlines.pop(KEYS.record(trace_id), None)
        self.pending[trace_id] = self.now
        self.submitted += 1

    def _end_pending(self, trace_id: str, record: TraceRecord) -> None:
        self.pending.pop(trace_id, None)
        record.forget_pending()
        self.expires_in(KEYS.record(trace_id), RECORD_TTL_MS)

    def _forget_pending(self, trace_id: str) -> None:
        del self.pending[trace_id]
        self.submitted -= 1
        self.lose(KEYS.record(trace_id))
