"""The specification of the ledger in plain Python: what each event changes in a record of each state.

The records have the same fields as those in Redis, so that they can be compared.
"""

from collections import Counter
from collections.abc import Sequence

from kp_scorer.decision import Decision
from kp_scorer.errors import Reason, TraceConflict, TraceDead
from kp_scorer.store.records import Identity, Record, Revision, TraceState, Verdict, parsed_in

from tests.model.contents import letter_id_of
from tests.model.patched_scripts import LETTER_BYTES, MOST_NAMES
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
    key_of,
)
from tests.model.reference_facts import FactsModel
from tests.model.reference_log import LogModel


class Reference:
    """A model of the ledger: the state that the scripts must produce."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000
        self.records: dict[str, TraceRecord] = {}
        self.pending: dict[str, int] = {}
        self.submitted = self.decided = self.dead = 0
        self.tallies = Counter[str]()
        self.letters: dict[str, Letter] = {}
        self.letter_index: dict[str, int] = {}
        self.letter_sizes: dict[str, tuple[int, str]] = {}
        """The size and the kind of each dead letter."""
        self.kinds: dict[str, dict[str, int]] = {"junk": {}, "rest": {}}
        """The dead letters of each kind, with their times."""
        self.dropped = Counter[str]()
        self.dead_lettered = Counter[str]()
        self.workers: dict[str, int] = {}
        self.reports: dict[str, bytes] = {}
        self.drained: int | None = None
        self.log = LogModel()
        self.facts = FactsModel()
        self.deadlines: dict[str, int] = {}
        self.serials = 0

    # Lifetimes: keys that may expire do so at their deadlines, and not before.

    def expires_in(self, key: str, ttl_ms: int) -> None:
        self.deadlines[key] = self.now + ttl_ms

    def due(self) -> list[str]:
        """Return every key that is due to expire."""
        return sorted(key for key, deadline in self.deadlines.items() if deadline <= self.now)

    def lose(self, key: str) -> None:
        self.deadlines.pop(key, None)
        for trace_id in [trace_id for trace_id in self.records if KEYS.record(trace_id) == key]:
            del self.records[trace_id]
        for letter_id in [letter_id for letter_id in self.letters if KEYS.dead_letter(letter_id) == key]:
            del self.letters[letter_id]
        for kind in self.kinds:
            if key == key_of(kind):
                self.kinds[kind].clear()
        if key == KEYS.dead_letters:
            self.letter_index.clear()
        elif key == KEYS.dead_letter_sizes:
            self.letter_sizes.clear()
        elif key == KEYS.workers:
            self.workers.clear()
        elif key in self.reports:
            del self.reports[key]
        elif key == KEYS.drained:
            self.drained = None
        else:
            self.log.lose(key)
            self.facts.lose(key)

    # Submitting and deciding.

    def submit(self, trace_id: str, digest: bytes, submission: bytes) -> str:
        record = self.records.setdefault(trace_id, TraceRecord())
        if record.state in ("pending", "decided") and record.digest != digest:
            return "conflict"
        if record.state == "decided":
            return "decided"
        if record.state != "pending":
            record = self._to_pending(trace_id, record, digest)
        record.submission, record.as_letter = submission, digest + letter_id_of(submission).encode()
        self.pending[trace_id] = self.now
        return "pending"

    def acquire(self, worker: str, identities: Sequence[Identity], *, alone: bool) -> list[Record]:
        self._is_heard(worker)
        return [self._acquire(worker, *identity, alone=alone) for identity in identities]

    def _acquire(self, worker: str, trace_id: str, digest: bytes, *, alone: bool) -> Record:
        record = self.records.setdefault(trace_id, TraceRecord())
        is_held = False
        if not record.state or (record.state == "dead" and record.digest != digest):
            record = self._to_pending(trace_id, record, digest)
        if record.state == "pending" and record.digest == digest:
            if record.owner not in ("", worker):
                if self.workers.get(record.owner, 0) > self.now:
                    is_held = record.held_until_ms > self.now
                else:
                    record.attempts += 1
                    record.release()
            if not is_held and (alone or not record.attempts):
                record.owner, record.held_until_ms = worker, self.now + TRACE_LEASE_MS
        state: TraceState = "pending" if record.state == "pending" else "decided" if record.state == "decided" else "dead"
        reason: Reason | None = record.reason or None  # type: ignore[assignment]
        return Record(
            state, record.digest, parsed_in(Decision, record.decision), reason, record.detail, record.attempts, is_held
        )

    def release(self, worker: str, trace_ids: Sequence[str]) -> None:
        for trace_id in trace_ids:
            record = self.records.get(trace_id)
            if record and record.owner == worker:
                record.release(self.now)

    def renew(self, worker: str, report: str, deciding: Sequence[str]) -> None:
        self.workers = {
            name: until_ms for name, until_ms in self.workers.items() if until_ms > self.now - WORKERS_REMEMBERED_MS
        }
        self._is_heard(worker)
        self.reports[KEYS.worker(worker)] = report.encode()
        self.expires_in(KEYS.worker(worker), WORKER_LEASE_MS)
        for trace_id in deciding:
            record = self.records.get(trace_id)
            if record and record.owner == worker:
                record.held_until_ms = self.now + TRACE_LEASE_MS

    def _is_heard(self, worker: str) -> None:
        self.workers[worker] = self.now + WORKER_LEASE_MS
        self.expires_in(KEYS.workers, WORKERS_REMEMBERED_MS)

    def commit(self, verdict: Verdict, *, lacks_fact: bool) -> Decision | str | None:
        """Commit a verdict; return the result, or the text of the error.

        ``lacks_fact`` is true if the verdict may rest on an earlier one's fact that was not stored.
        """
        record = self.record(verdict.trace_id)
        # A dead record without a digest belongs to a submission that could not be decoded, and so to another one than this.
        if (record.state or record.digest) and record.digest != verdict.digest:
            return str(TraceConflict(verdict.trace_id))
        if record.state == "decided":
            return parsed_in(Decision, record.decision)
        if record.state == "dead":
            return str(TraceDead(verdict.trace_id, record.reason, record.detail))  # type: ignore[arg-type]
        if (verdict.entry and record.entry != verdict.entry) or lacks_fact:
            return "again"
        if record.state != "pending":
            record = self._to_pending(verdict.trace_id, record, verdict.digest)
        self._end_pending(verdict.trace_id, record)
        record.state, record.decision = "decided", verdict.decision
        self.decided += 1
        self._count(verdict)
        record.fact = self.facts.append(self, verdict)
        self.pending |= {each: 0 for each in record.outcomes.split() if each in self.pending}
        return "stored"

    def revise(self, revision: Revision) -> Decision | str | None:
        record, trace = self.record(revision.outcome_id), self.record(revision.trace_id)
        if (record.state or record.digest) and record.digest != revision.digest:
            return str(TraceConflict(revision.outcome_id))
        if record.state == "decided":
            return parsed_in(Decision, record.decision)
        if record.state == "dead":
            return str(TraceDead(revision.outcome_id, record.reason, record.detail))  # type: ignore[arg-type]
        newest = parsed_in(Decision, trace.revised or trace.decision) if trace.state == "decided" else None
        if bool(newest) != bool(revision.decision) or (newest and newest.decided_at != revision.supersedes):
            return "again"
        trace = self.records.setdefault(revision.trace_id, trace)
        if revision.outcome_id not in trace.outcomes.split():
            trace.outcomes += f"{revision.outcome_id} "
        if record.state != "pending":
            record = self._to_pending(revision.outcome_id, record, revision.digest)
        if newest is None:
            record.release()
            record.submission, record.revises = revision.submission, revision.trace_id
            if not trace.state:
                self.expires_in(KEYS.record(revision.trace_id), RECORD_TTL_MS)
            return "waits"
        trace.revised = revision.decision
        self.expires_in(KEYS.record(revision.trace_id), RECORD_TTL_MS)
        self._end_pending(revision.outcome_id, record)
        record.state, record.decision = "decided", revision.decision
        self.decided += 1
        self.tallies[f"revised {revision.outcome}"] += 1
        trace.fact = self.facts.revise(self, trace.fact, revision.change)
        return "stored"

    def _count(self, verdict: Verdict) -> None:
        name = verdict.domain
        if not verdict.is_known and f"decided {name}" not in self.tallies:
            # Once that many other domains have a name, any further one is counted without its name.
            name = name if self.tallies["names"] < MOST_NAMES else ""
            self.tallies["names"] += bool(name)
        self.tallies[f"decided {name}"] += 1
        self.tallies.update(f"guard {guard}" for guard in verdict.guards.split())

    # Dead letters.

    def dead_letter(self, payload: bytes, reason: str, detail: str, trace_id: str, digest: bytes, deliveries: int) -> bytes:
        """Return the decision of this very submission if there is one; otherwise keep a letter and return nothing."""
        record = self.record(trace_id) if trace_id else None
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
                # The right id of these bytes is known now, so the record that died by them under another id did so by mistake.
                self._forget_dead(named, letter_id)
            else:
                # These bytes have no id of their own. They came under another id first, and their letter belongs to that id's
                # record.
                record, trace_id = None, named
        is_new = self._keep_letter(letter_id, payload, reason, detail, trace_id, deliveries)
        ends_pending = record is not None and record.state == "pending" and is_same
        self.submitted += is_new and not ends_pending
        self.dead += is_new or ends_pending
        if record and (record.state in ("", "dead") or ends_pending):
            self.records[trace_id] = record
            # A dead record under this id keeps its place in the log, unless it gets other content.
            if record.digest != digest and (digest or not record.state):
                record.forget_place()
                record.digest = digest
            self._end_pending(trace_id, record)
            record.state, record.reason, record.detail, record.letter = "dead", reason, detail, letter_id
        return b""

    def _keep_letter(self, letter_id: str, payload: bytes, reason: str, detail: str, trace_id: str, deliveries: int) -> bool:
        old = self.letters.get(letter_id)
        first_ms, burials = (old.first_ms, old.burials + 1) if old else (self.now, 1)
        self.serials += 1
        self.dead_lettered[reason] += 1
        self.letters[letter_id] = Letter(
            payload, reason, detail, trace_id, deliveries, first_ms, self.now, burials, self.serials
        )
        self.expires_in(KEYS.dead_letter(letter_id), KEPT_MS)
        self.letter_index[letter_id] = self.now
        self.expires_in(KEYS.dead_letters, KEPT_MS)
        self._leave_kind(letter_id)
        kind = "junk" if reason in ("malformed", "invalid", "conflict") else "rest"
        self.letter_sizes[letter_id] = len(payload) + LETTER_BYTES, kind
        self.kinds[kind][letter_id] = self.now
        for key in (KEYS.dead_letter_sizes, key_of(kind)):
            self.expires_in(key, KEPT_MS)
        return old is None

    def _leave_kind(self, letter_id: str) -> None:
        self.letter_sizes.pop(letter_id, None)
        if not self.letter_sizes:
            self.lose(KEYS.dead_letter_sizes)
        for kind, index in self.kinds.items():
            index.pop(letter_id, None)
            if not index:
                self.lose(key_of(kind))

    def bytes_of_kinds(self) -> dict[str, str]:
        sums = Counter[str]()
        for size, kind in self.letter_sizes.values():
            sums[kind] += size
        return {kind: str(size) for kind, size in sums.items()}

    def next_to_go(self) -> tuple[str, str] | None:
        """Return the letter to remove next and its reason, empty if it has expired; return None if all is within bounds."""
        if not self.letter_index:
            return None
        oldest, newest = (least_or_most(self.letter_index, key=self._age) for least_or_most in (min, max))
        if self.letter_index[oldest] <= self.now - KEPT_MS:
            return oldest, ""
        for index in self.kinds.values():
            # The newest letter does not count, so that one is always kept.
            size = sum(self.letter_sizes[each][0] for each in index if each != newest)
            if len(index) > LEDGER.max_dead_letters or size > LEDGER.max_dead_letter_bytes:
                first = min(index, key=self._age)
                return first, self.letters[first].reason
        return None

    def _age(self, letter_id: str) -> tuple[int, str]:
        return self.letter_index[letter_id], letter_id

    def make_room(self) -> list[str]:
        """Remove letters until all is within bounds; return the reasons of those that had not expired."""
        reasons = []
        while following := self.next_to_go():
            letter_id, reason = following
            self._remove_letter(letter_id)
            if reason:
                reasons.append(reason)
        self.dropped.update(reasons)
        return reasons

    def drop(self, letter_id: str, serial: int) -> bool:
        """Drop a letter, unless it has been dead-lettered again since it was read."""
        letter = self.letters.get(letter_id)
        if letter is None or letter.serial != serial:
            return False
        self._remove_letter(letter_id)
        return True

    def _remove_letter(self, letter_id: str) -> None:
        trace_id = self.letters[letter_id].trace_id if letter_id in self.letters else ""
        self.lose(KEYS.dead_letter(letter_id))
        self._leave_kind(letter_id)
        del self.letter_index[letter_id]
        if not self.letter_index:
            self.lose(KEYS.dead_letters)
        self._forget_dead(trace_id, letter_id)

    def _forget_dead(self, trace_id: str, letter_id: str) -> None:
        record = self.records.get(trace_id)
        if record and record.state == "dead" and record.letter == letter_id:
            self.lose(KEYS.record(trace_id))

    # Resending lost messages, and erasing.

    def claim_lost(self, *, empty_ms_ago: int) -> list[tuple[str, bytes, int]]:
        if empty_ms_ago >= 0:
            self.drained = self.now - empty_ms_ago
            self.expires_in(KEYS.drained, KEPT_MS)
        before = max(1, min(self.drained or 0, self.now - RESEND_AFTER_MS))
        claimed = []
        for sent_ms, trace_id in sorted((sent_ms, trace_id) for trace_id, sent_ms in self.pending.items()):
            if sent_ms >= before:
                continue
            record = self.records[trace_id]
            is_held_by_worker = record.held_until_ms > self.now - RESEND_AFTER_MS
            if not is_held_by_worker and not record.submission and self.now - record.since_ms >= KEPT_MS:
                self._forget_pending(trace_id)
                continue
            self.pending[trace_id] = min(self.now, record.held_until_ms) if is_held_by_worker else self.now
            is_early = record.revises and self.record(record.revises).state != "decided"
            waits = is_early and self.now - record.since_ms < RECORD_TTL_MS
            if not is_held_by_worker and record.submission and not waits:
                claimed.append((trace_id, record.submission, record.resends))
        return claimed

    def count_resend(self, trace_id: str) -> None:
        if trace_id in self.pending:
            self.pending[trace_id] = self.now
            self.records[trace_id].resends += 1

    def erase_entries(self, trace_id: str) -> int:
        record, entries = self.records.get(trace_id), [each for each in self.log.present() if each.trace_id == trace_id]
        if record and entries:
            record.forget_place()
        return self.log.erase(entries, self)

    def erase_record(self, trace_id: str) -> int:
        for outcome_id in self.record(trace_id).outcomes.split():
            self.erase_record(outcome_id)
        if trace_id in self.pending:
            self._forget_pending(trace_id)
            return 1
        count = int(trace_id in self.records)
        self.lose(KEYS.record(trace_id))
        return count

    def record(self, trace_id: str) -> TraceRecord:
        return self.records.get(trace_id, TraceRecord())

    # Steps that several events have in common.

    def _to_pending(self, trace_id: str, record: TraceRecord, digest: bytes) -> TraceRecord:
        """Begin a record anew. It keeps its place in the log if the content is the same."""
        begun = self.records[trace_id] = TraceRecord("pending", digest, since_ms=self.now, outcomes=record.outcomes)
        if record.digest == digest:
            begun.epoch, begun.entry = record.epoch, record.entry
        self.deadlines.pop(KEYS.record(trace_id), None)
        self.pending[trace_id] = self.now
        self.submitted += 1
        return begun

    def _end_pending(self, trace_id: str, record: TraceRecord) -> None:
        self.pending.pop(trace_id, None)
        record.since_ms, record.submission, record.resends, record.attempts, record.revises = 0, b"", 0, 0, ""
        record.release()
        self.expires_in(KEYS.record(trace_id), RECORD_TTL_MS)

    def _forget_pending(self, trace_id: str) -> None:
        del self.pending[trace_id]
        self.submitted -= 1
        self.lose(KEYS.record(trace_id))
