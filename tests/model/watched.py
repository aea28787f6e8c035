"""The store as workers, clients and operators use it: each call goes to Redis and to the model, and both must say the same."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import redis
from kp_scorer.decision import Decision
from kp_scorer.errors import Reason, ServiceUnavailable, TraceConflict
from kp_scorer.novelty import Candidate
from kp_scorer.novelty.log import Cursor, Place, Tail
from kp_scorer.store import (
    Claim,
    Committed,
    DeadLetter,
    DeadLetters,
    Identity,
    Record,
    RedisLedger,
    RedisLog,
    Standing,
    State,
    Submission,
    Verdict,
)

from tests.model.baton import Violation, stop_before
from tests.model.contents import WordEmbedder, by_bytes, letter_id_of
from tests.model.records import KEYS, LEDGER, RECORD_TTL_MS, TRACE_LEASE_MS
from tests.model.reference import Reference
from tests.model.reference_log import WINDOW

TOLERANCE: Final = 1e-5

T = TypeVar("T")


class Books:
    """The books in Redis and the model of them."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.model = Reference()
        self.made: dict[bytes, bytes] = {}
        """Every decision that was ever stored, and the digest of what was decided."""


def expect(what: str, found: object, expected: object) -> None:
    """Raise a violation if a script said something else than the model."""
    if found != expected:
        raise Violation(f"{what}: Redis says {found!r}, the specification {expected!r}")


def _call(function: Callable[[], T]) -> T:
    # Redis answers here, so this is an error in a script.
    try:
        return function()
    except ServiceUnavailable as error:
        raise Violation(f"a script failed: {error}, {error.__context__!r}") from error


class WatchedLedger:
    """A ledger of a worker or a client of its own."""

    def __init__(self, books: Books, log: "WatchedLog | None" = None) -> None:
        """``log`` is that of the same worker, which knows what the decisions must say."""
        self._books = books
        self._log = log
        self.real = RedisLedger(books.client, KEYS, RECORD_TTL_MS, TRACE_LEASE_MS)
        self.worker = self.real.worker

    def open(self, submission: Submission) -> State | TraceConflict:
        (found,) = _call(lambda: self.real.open([submission]))
        expected = self._books.model.open(*submission)
        expect(f"open {submission.trace_id}", "conflict" if isinstance(found, TraceConflict) else found, expected)
        return found

    def begin(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        stop_before("begin")
        found = _call(lambda: self.real.begin(identities, alone=alone))
        expect(f"begin {_ids(identities)}", found, self._books.model.begin(self.worker, identities, alone=alone))
        return found

    def release(self, trace_ids: Sequence[str]) -> None:
        stop_before("release")
        _call(lambda: self.real.release(trace_ids))
        self._books.model.release(self.worker, trace_ids)

    def renew(self) -> None:
        deciding = tuple(self.real._deciding)
        _call(self.real.renew)
        self._books.model.renew(self.worker, deciding)

    def commit(self, verdicts: Sequence[Verdict], comparison: str = "") -> list[Committed]:
        stop_before("commit")
        found = _call(lambda: self.real.commit(verdicts, comparison))
        for verdict, committed in zip(verdicts, found, strict=True):
            expect(f"commit {verdict.trace_id}", committed, self._books.model.commit(verdict, comparison))
            if isinstance(committed, Standing) and committed.is_own:
                self._books.made[verdict.decision] = verdict.digest
                if self._log:
                    self._log.check_novelty(Decision.model_validate_json(verdict.decision))
        return found

    def claim_lost(self, resend_after_ms: int, *, queue_is_empty: bool) -> list[Claim]:
        stop_before("claim")
        found = _call(lambda: self.real.claim_lost(resend_after_ms, queue_is_empty=queue_is_empty))
        claimed = self._books.model.claim(queue_is_empty=queue_is_empty)
        expect("claim", [(claim.trace_id, claim.payload, claim.resends) for claim in found], claimed)
        return found

    def look_up(self, trace_ids: Sequence[str]) -> list[Record | None]:
        stop_before("look_up")
        found = _call(lambda: self.real.look_up(trace_ids))
        states = [self._books.model.record(trace_id).state for trace_id in trace_ids]
        expect(f"look_up {trace_ids}", [record.state if record else "" for record in found], states)
        return found

    def resent(self, trace_id: str) -> None:
        stop_before("resent")
        _call(lambda: self.real.resent(trace_id))
        self._books.model.resent(trace_id)

    def erase(self, trace_id: str) -> int:
        found = _call(lambda: self.real.erase(trace_id))
        expect(f"erase_record {trace_id}", found, self._books.model.erase_record(trace_id))
        return found


class WatchedLetters:
    """The dead letters."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.real = DeadLetters(books.client, KEYS, LEDGER)
        self._bury_script: Any = self.real._bury
        self._make_room_script: Any = self.real._make_room
        setattr(self.real, "_make_room", self._make_room)  # noqa: B010  # no Script, but called like one

    def bury(
        self, payload: bytes, reason: Reason, detail: str, trace_id: str = "", digest: bytes = b"", deliveries: int = 1
    ) -> Decision | None:
        stop_before("bury")
        model = self._books.model

        def bury_both(keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
            reply: Any = self._bury_script(keys=keys, args=args)
            # Whoever buries says what was decoded: all that can be, unless the limits of a worker forbid it.
            said = digest if reason == "invalid" else by_bytes(payload).digest
            expected = model.bury(payload, reason, detail, trace_id, said, deliveries)
            expect(f"bury {trace_id} as {reason}", reply, [expected, int(not expected and model.is_over())])
            if not expected and self.real.payload(letter_id_of(payload)) != payload:
                raise Violation(f"bury {trace_id}: its bytes are not kept")
            return reply

        setattr(self.real, "_bury", bury_both)  # noqa: B010  # no Script, but called like one
        return _call(lambda: self.real.bury(payload, reason, detail, trace_id, digest, deliveries))

    def _make_room(self, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        stop_before("make_room")
        reply: Any = self._make_room_script(keys=keys, args=args)
        expect("make room", reply, [self._books.model.make_room(), 0])
        return reply

    def read(self) -> list[tuple[DeadLetter, int]]:
        """All letters, and the burial that each was read at."""
        found = list(_call(lambda: list(self.real.read())))
        letters = self._books.model.letters
        expect("letters", sorted(letter.letter_id for letter in found), sorted(letters))
        return [(letter, letters[letter.letter_id].serial) for letter in found]

    def payload(self, letter_id: str) -> bytes:
        return _call(lambda: self.real.payload(letter_id))

    def drop(self, letter: DeadLetter, serial: int) -> bool:
        found = _call(lambda: self.real.drop(letter))
        expect(f"drop {letter.letter_id} of {letter.trace_id}", found, self._books.model.drop(letter.letter_id, serial))
        return found


class WatchedLog:
    """The novelty log as one worker uses it."""

    space = WordEmbedder.space

    def __init__(self, books: Books) -> None:
        self._books = books
        self.real = RedisLog(books.client, KEYS, self.space, WINDOW, RECORD_TTL_MS)
        self._erase_script: Any = self.real._erase
        setattr(self.real, "_erase", self._erase_entries)  # noqa: B010  # no Script, but called like one
        self._places: list[str] = []
        self._is_reading_on = False
        self.expected: dict[str, float | None] = {}
        """What the log gives, as of the last reading, for the places of the batch in hand."""

    def exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        stop_before("exchange")
        model = self._books.model
        places, tail = _call(lambda: self.real.exchange(candidates, cursor))
        given = [str(place) if place else "" for place in places]
        expected = model.log.exchange(model, tail.epoch, candidates, given)
        expect(f"admit {[candidate.trace_id for candidate in candidates]}", given, expected)
        if candidates:
            self._places = [place for place in given if place]
        elif not self._is_reading_on:
            # Nothing is placed, the log is only read.
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
        """Erase a trace's vectors: find out where they are, and in a second step erase them there."""
        there = [entry.place for entry in self._books.model.log.present() if entry.trace_id == trace_id]
        erased = self.real.erase(trace_id)
        left = {entry.place for entry in self._books.model.log.present()}.intersection(there)
        if left:
            raise Violation(f"forget {trace_id}: the log still holds its entries {sorted(left)}")
        return erased

    def _erase_entries(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> int:
        stop_before("erase_entries")
        found = int(_call(lambda: self._erase_script(keys=keys, args=args)))
        trace_id = keys[2].removeprefix(KEYS.record(""))
        places = [place.decode() if isinstance(place, bytes) else str(place) for place in args[2:]]
        expect(f"erase_entries {trace_id}", found, self._books.model.erase_entries(trace_id, places))
        return found

    def check_novelty(self, decision: Decision) -> None:
        """What is about to be stored must be what the log gave."""
        nearest, place = decision.novelty.nearest, decision.novelty.entry or ""
        if place not in self.expected:
            raise Violation(f"novelty of {decision.trace_id}: it rests on {place}, where it is not placed")
        expected = self.expected[place]
        found = nearest.similarity if nearest else None
        if (found is None) != (expected is None) or (
            found and expected and not math.isclose(found, expected, abs_tol=TOLERANCE)
        ):
            raise Violation(f"novelty of {decision.trace_id} at {place}: similarity {found}, the log gives {expected}")


def _ids(identities: Sequence[Identity]) -> list[str]:
    return [identity.trace_id for identity in identities]
