"""The store as workers, clients and operators use it. Each call goes to Redis and to the model, and both must agree."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pytest
import redis
from kp_scorer.decision import Decision
from kp_scorer.errors import ScorerError, ServiceUnavailable, TraceConflict
from kp_scorer.novelty import Candidate
from kp_scorer.novelty.log import Cursor, Place, Tail
from kp_scorer.store.dead_letters import DeadLetter, DeadLettering, DeadLetters, _dead_letter, _make_room
from kp_scorer.store.fact_streams import RedisFacts
from kp_scorer.store.ledger import RedisLedger
from kp_scorer.store.novelty_log import RedisLog, _erase_entries
from kp_scorer.store.records import (
    Committed,
    Identity,
    LostSubmission,
    Record,
    Revised,
    Revision,
    Submission,
    TraceState,
    Verdict,
    parsed_in,
)
from kp_scorer.store.scripts import Script

from tests.model.baton import Violation, stop_before
from tests.model.contents import SECRET, by_bytes, letter_id_of
from tests.model.records import KEYS, LEDGER, RECORD_TTL_MS, TRACE_LEASE_MS
from tests.model.reference import Reference
from tests.model.reference_facts import BOUNDS
from tests.model.reference_log import WINDOW
from tests.support.word_embedder import WordEmbedder

TOLERANCE: Final = 1e-5

T = TypeVar("T")

Around = Callable[[Callable[[], Any], Sequence[Any]], Any]


class Books:
    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.model = Reference()
        self.made: dict[bytes, bytes] = {}
        """Every decision that was ever stored, with the digest of the trace that it decided."""


def expect(event: str, reply: object, expected: object) -> None:
    """Raise a violation if a script's reply differs from the model's."""
    if reply != expected:
        raise Violation(f"{event}: Redis says {reply!r}, the specification {expected!r}")


def _call(name: str, function: Callable[[], T]) -> T:
    """Stop before a call of the store, and then make the call."""
    stop_before(name)
    # This Redis is never away, so an error means that a script failed.
    try:
        return function()
    except ServiceUnavailable as error:
        raise Violation(f"a script failed: {error}, {error.__context__!r}") from error


class WatchedLedger:
    """The ledger as one worker or one client uses it."""

    copies_traces = False

    def __init__(self, books: Books, log: "WatchedLog | None" = None) -> None:
        """Take the ``log`` of the same worker, which knows what the decisions must say."""
        self._books = books
        self._log = log
        self.real = RedisLedger(books.client, KEYS, RECORD_TTL_MS, TRACE_LEASE_MS)
        self.real.facts = WatchedFacts(books)
        self.worker = self.real.worker

    def submit(self, submission: Submission) -> TraceState | TraceConflict:
        (state,) = _call("submit", lambda: self.real.submit([submission]))
        expected = self._books.model.submit(*submission)
        expect(f"submit {submission.trace_id}", "conflict" if isinstance(state, TraceConflict) else state, expected)
        return state

    def acquire(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        reply = _call("acquire", lambda: self.real.acquire(identities, alone=alone))
        expected = self._books.model.acquire(self.worker, identities, alone=alone)
        expect(f"acquire {[each.trace_id for each in identities]}", reply, expected)
        return reply

    def release(self, trace_ids: Sequence[str]) -> None:
        _call("release", lambda: self.real.release(trace_ids))
        self._books.model.release(self.worker, trace_ids)

    def renew(self) -> None:
        deciding = tuple(self.real._deciding)
        report = f"of {self.worker}"
        _call("renew", lambda: self.real.renew(report))
        self._books.model.renew(self.worker, report, deciding)

    def commit(self, verdicts: Sequence[Verdict]) -> list[Committed]:
        reply = _call("commit", lambda: self.real.commit(verdicts))
        lacks_fact = False
        for verdict, committed in zip(verdicts, reply, strict=True):
            reply_or_error = str(committed) if isinstance(committed, ScorerError) else committed
            expected = self._books.model.commit(verdict, lacks_fact=lacks_fact)
            expect(f"commit {verdict.trace_id}", reply_or_error, expected)
            lacks_fact = lacks_fact or expected != "stored"
            if committed == "stored":
                self._books.made[verdict.decision] = verdict.digest
                if self._log:
                    self._log.check_novelty(Decision.model_validate_json(verdict.decision))
        return reply

    def outcome_secret(self) -> str:
        return SECRET

    def revise(self, revisions: Sequence[Revision]) -> list[Revised]:
        reply = _call("revise", lambda: self.real.revise(revisions))
        for revision, revised in zip(revisions, reply, strict=True):
            of_trace = self._books.model.record(revision.trace_id)
            earlier = [parsed_in(Decision, each) for each in (of_trace.decision, of_trace.revised) if each]
            reply_or_error = str(revised) if isinstance(revised, ScorerError) else revised
            expect(f"revise {revision.outcome_id}", reply_or_error, self._books.model.revise(revision))
            if revised == "stored":
                self._books.made[revision.decision] = revision.digest
                _check_revision(Decision.model_validate_json(revision.decision), earlier)
        return reply

    def claim_lost(self, resend_after_ms: int, *, empty_ms_ago: int) -> list[LostSubmission]:
        reply = _call("claim_lost", lambda: self.real.claim_lost(resend_after_ms, empty_ms_ago=empty_ms_ago))
        claimed = self._books.model.claim_lost(empty_ms_ago=empty_ms_ago)
        expect("claim_lost", [(claim.trace_id, claim.payload, claim.resends) for claim in reply], claimed)
        return reply

    def look_up(self, trace_ids: Sequence[str]) -> list[Record | None]:
        reply = _call("look_up", lambda: self.real.look_up(trace_ids))
        states = [self._books.model.record(trace_id).state for trace_id in trace_ids]
        expect(f"look_up {trace_ids}", [record.state if record else "" for record in reply], states)
        newest = [self._books.model.record(trace_id) for trace_id in trace_ids]
        decisions = [parsed_in(Decision, each.revised or each.decision) for each in newest]
        expect(f"look_up {trace_ids}", [record.decision if record else None for record in reply], decisions)
        return reply

    def count_resend(self, trace_id: str) -> None:
        _call("count_resend", lambda: self.real.count_resend(trace_id))
        self._books.model.count_resend(trace_id)

    def erase(self, trace_id: str) -> int:
        (reply,) = _call("erase_records", lambda: self.real.erase(trace_id))
        expect(f"erase_records {trace_id}", reply, self._books.model.erase_record(trace_id))
        return reply


def _check_revision(revision: Decision, earlier: Sequence[Decision | None]) -> None:
    """Check that a revision follows the newest decision of its trace, and keeps the novelty and the place of the first."""
    first, newest = earlier[0], earlier[-1]
    if not (first and newest and revision.supersedes) or (first.novelty, first.gate and first.gate.adds) != (
        revision.novelty,
        revision.gate and revision.gate.adds,
    ):
        raise Violation(f"revision of {revision.trace_id}: its novelty, or what it adds, is not that of the first decision")
    if revision.revision != newest.revision + 1 or revision.supersedes.decided_at != newest.decided_at:
        raise Violation(f"revision of {revision.trace_id}: {revision.revision} after {newest.revision}")


class _Client:
    """A connection that runs some scripts through a function, which gets the call and the script's keys and arguments."""

    def __init__(self, client: redis.Redis, around: Mapping[Script[..., Any], Around]) -> None:
        self._client: Any = client
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def execute_command(self, *command: Any) -> Any:
        for script, around in self._around.items():
            if command[1] == script.sha:
                return around(lambda: self._client.execute_command(*command), command[3:])
        return self._client.execute_command(*command)


class WatchedLetters:
    def __init__(self, books: Books) -> None:
        self._books = books
        client: Any = _Client(books.client, {_dead_letter: self._dead_letter, _make_room: self._make_room})
        self.real = DeadLetters(client, KEYS, LEDGER)
        self._check: Callable[[Any], None]

    def dead_letter(self, payload: bytes, why: DeadLettering) -> Decision | None:
        reason, detail, trace_id, digest, deliveries = why

        def check(reply: Any) -> None:
            model = self._books.model
            # A dead-lettering names the digest only if the worker could decode the bytes within its limits.
            decoded = digest if reason == "invalid" else by_bytes(payload).digest
            expected = model.dead_letter(payload, reason, detail, trace_id, decoded, deliveries)
            expect(f"dead_letter {trace_id} as {reason}", reply, [expected, int(not expected and bool(model.next_to_go()))])
            if not expected and self.real.payload(letter_id_of(payload)) != payload:
                raise Violation(f"dead_letter {trace_id}: its bytes are not kept")

        self._check = check
        return _call("dead_letter", lambda: self.real.dead_letter(payload, why))

    def _dead_letter(self, run: Callable[[], Any], _: Sequence[Any]) -> Any:
        reply = run()
        self._check(reply)
        return reply

    def _make_room(self, run: Callable[[], Any], _: Sequence[Any]) -> Any:
        stop_before("make_room")
        reply = run()
        expect("make room", reply, [[reason.encode() for reason in self._books.model.make_room()], 0])
        return reply

    def read(self) -> list[tuple[DeadLetter, int]]:
        """Return all letters, each with the serial number of its dead-lettering when it was read."""
        reply = _call("read the letters", lambda: list(self.real.read()))
        letters = self._books.model.letters
        expect("letters", sorted(letter.letter_id for letter in reply), sorted(letters))
        return [(letter, letters[letter.letter_id].serial) for letter in reply]

    def payload(self, letter_id: str) -> bytes:
        return _call("read the payload", lambda: self.real.payload(letter_id))

    def drop(self, letter: DeadLetter, serial: int) -> bool:
        reply = _call("drop", lambda: self.real.drop(letter))
        expect(f"drop {letter.letter_id} of {letter.trace_id}", reply, self._books.model.drop(letter.letter_id, serial))
        return reply


class WatchedFacts(RedisFacts):
    """The facts as one worker uses them.

    It reads them in the same step of the model as the append to the novelty log before.
    """

    def __init__(self, books: Books) -> None:
        super().__init__(books.client, KEYS, WordEmbedder.space, BOUNDS)
        self._books = books

    def erase(self, *trace_ids: str) -> Counter[str]:
        erased = super().erase(*trace_ids)
        for trace_id in trace_ids:
            self._books.model.facts.erase(self._books.model, trace_id)
            if erased[trace_id]:
                # The record loses its place even if the log no longer holds the trace's entry.
                self._books.model.record(trace_id).forget_place()
        return erased


class WatchedLog:
    """The novelty log as one worker uses it."""

    space = WordEmbedder.space

    def __init__(self, books: Books) -> None:
        self._books = books
        client: Any = _Client(books.client, {_erase_entries: self._erase_entries})
        self.real = RedisLog(client, KEYS, self.space, WINDOW, RECORD_TTL_MS)
        self._places: list[str] = []
        self._is_reading_on = False
        self.expected: dict[str, float | None] = {}
        """The similarity of each place in the batch being decided, by the model's log when it was last read."""

    def append(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        places, tail = _call("append", lambda: self.real.append(candidates, cursor))
        model = self._books.model
        replied = [str(place) if place else "" for place in places]
        expected = model.log.append(model, tail.epoch, candidates, replied)
        expect(f"admit {[candidate.trace_id for candidate in candidates]}", replied, expected)
        if candidates:
            self._places = [place for place in replied if place]
        elif not self._is_reading_on:
            # This call places nothing; it only reads the log.
            return places, tail
        self._is_reading_on = tail.more
        self.expected = {}
        for place in self._places:
            own = model.log.at(place)
            if own and not own.is_erased:
                if not model.log.is_whole(place):
                    raise Violation(f"admit {own.trace_id}: the log does not hold all of the window of {place}")
                self.expected[place] = model.log.similarity(place)
        return places, tail

    def erase(self, trace_id: str) -> int:
        """Erase a trace's vectors. One step does that if it can read the whole log."""
        there = [entry.place for entry in self._books.model.log.present() if entry.trace_id == trace_id]
        erased = self.real.erase(trace_id)[trace_id]
        left = {entry.place for entry in self._books.model.log.present()}.intersection(there)
        if left:
            raise Violation(f"forget {trace_id}: the log still holds its entries {sorted(left)}")
        return erased

    def _erase_entries(self, run: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        erased = _call("erase_entries", run)
        trace_id = arguments[-1]
        # Erase the facts in the same step, so that nobody sees one without the other.
        WatchedFacts(self._books).erase(trace_id)
        expected = [trace_id.encode()] * self._books.model.erase_entries(trace_id)
        expect(f"erase_entries {trace_id}", erased, [b"", expected])
        return erased

    def check_novelty(self, decision: Decision) -> None:
        """Check that a decision about to be stored has the novelty that the log gives."""
        nearest, place = decision.novelty.nearest, decision.novelty.entry or ""
        if place not in self.expected:
            raise Violation(f"novelty of {decision.trace_id}: it rests on {place}, where it is not placed")
        expected = self.expected[place]
        similarity = nearest.similarity if nearest else None
        if similarity != pytest.approx(expected, abs=TOLERANCE):
            raise Violation(f"novelty of {decision.trace_id} at {place}: similarity {similarity}, the log gives {expected}")
