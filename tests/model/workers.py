"""A worker process: what the consumer, the stages and the decider do, one script at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from kp_scorer.decider import Decider, PendingDecision, Resolved
from kp_scorer.decision import Decision
from kp_scorer.errors import Reason, ServiceUnavailable, TraceConflict, TraceDead, TraceHeld
from kp_scorer.gate import Gate
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.reviser import Revised, Reviser
from kp_scorer.scoring import Policy
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.trace import ReasoningTrace

from tests.model.baton import Stretch, Violation
from tests.model.contents import EmbeddingFailed, FailingEmbedder, Payload
from tests.model.reference_facts import BOUNDS, POLICY
from tests.model.reference_log import LARGEST_BATCH, WINDOW
from tests.model.watched import Books, WatchedFacts, WatchedLedger, WatchedLetters, WatchedLog

MAX_ATTEMPTS: Final = 2
MOST_READERS: Final = 2
_MOST_LEASED: Final = 6


@dataclass(eq=False)
class Message:
    """A message, wherever it is. Two messages may have the same content."""

    payload: Payload
    deliveries: int = 0


class Ended(NamedTuple):
    """A message that only needs its last step: its decision is published, or it is dead-lettered, and it is acknowledged."""

    message: Message
    end: Decision | DeadLettering


class Leased(NamedTuple):
    """A message whose trace this worker has leased, to decide it."""

    message: Message
    pending: PendingDecision


class Worker:
    """A worker process. It loses everything in this object when it crashes."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.letters = WatchedLetters(books)
        self.log = WatchedLog(books)
        self.ledger = WatchedLedger(books, self.log)
        self.embedder = FailingEmbedder()
        ledger: Any = self.ledger
        self.gate = Gate(WatchedFacts(books), self.embedder.dimensions, BOUNDS, POLICY)
        meter = NoveltyMeter(self.embedder, self.log, WINDOW)
        self.decider = Decider(ledger, Policy(max_confidence=0.5), meter, MAX_ATTEMPTS, gate=self.gate)
        self.in_flight: list[Message] = []
        self.waiting: list[Message] = []
        self.reviser = Reviser(ledger, POLICY, MAX_ATTEMPTS)
        self.late: list[Message] = []
        self.late_alone: list[Message] = []
        self.revising: tuple[list[Message], list[Revised | None], Stretch] | None = None
        self.alone: list[Message] = []
        self.ready: list[Leased] = []
        self.finishing: tuple[list[Leased], Stretch] | None = None
        self.ended: list[Ended] = []
        self.is_hopeless = False

    def take_strictly(self, message: Message, *, is_read: bool) -> None:
        """Receive a message that exceeds the worker's limits, so that it cannot decode the message or even find its id."""
        message.deliveries += 1
        self.in_flight.append(message)
        trace_id = message.payload.named_id if is_read else ""
        self.ended.append(Ended(message, DeadLettering("invalid", "steps: expected fewer", trace_id, b"")))

    def take(self, message: Message) -> None:
        """Receive a message. If it can never be decided, note how it ends."""
        message.deliveries += 1
        self.in_flight.append(message)
        payload = message.payload
        if payload.late:
            self.late.append(message)
        elif payload.trace is None and message.deliveries > MOST_READERS:
            # Workers have died reading this message, so it is not read any more, and goes by the id in its header.
            self.ended.append(Ended(message, DeadLettering("poison", "2 workers died", payload.header_id, b"")))
        elif payload.trace is None:
            self.ended.append(Ended(message, DeadLettering("invalid", "steps: expected some", payload.named_id, b"")))
        else:
            self.waiting.append(message)

    def can_begin(self) -> bool:
        if self.alone:
            return not self.can_finish()
        return bool(self.waiting) and len(self.ready) < _MOST_LEASED

    def begin(self, count: int, *, embedding_fails: bool) -> str:
        """Acquire and embed the next message that must be tried alone, or else up to ``count`` waiting ones."""
        alone = bool(self.alone)
        source = self.alone if alone else self.waiting
        messages = source[: 1 if alone else count]
        del source[: len(messages)]
        self.embedder.fails = embedding_fails
        decisions = self.decider.acquire([trace_in(message) for message in messages], alone=alone)
        leased = [Leased(*each) for each in zip(messages, decisions, strict=True)]
        self._sort_out([each for each in leased if not each.pending.is_claimed])
        claimed = [each for each in leased if each.pending.is_claimed]
        note = f"{_named(messages)}, alone: {alone}"
        try:
            self.decider.embed([each.pending for each in claimed], alone=alone)
        except EmbeddingFailed:
            if alone:
                self._dead_letter(messages[0], "scoring_failed", EmbeddingFailed.__name__)
            else:
                self.alone += [each.message for each in claimed]
            return f"{note}; embedding fails"
        except ServiceUnavailable:
            # The embedder is unhealthy, so the process returns its messages and ends.
            self.is_hopeless = True
        else:
            self.ready += claimed
        return note

    def can_finish(self) -> bool:
        return bool(self.ready) or self.finishing is not None

    def finish(self, *, fails: bool) -> str:
        """Run one more script that finishes the oldest ready group, or let the script fail, as in an outage."""
        if self.finishing is None:
            group, self.ready = self.ready[:LARGEST_BATCH], self.ready[LARGEST_BATCH:]
            self.finishing = group, Stretch(partial(self.decider.finish, [each.pending for each in group]))
        group, stretch = self.finishing
        named = _named([each.message for each in group])
        note = f"{named}: {stretch.next_call or 'nothing to do'}{' fails' if fails else ''}"
        if not stretch.is_done:
            stretch.run_on(ServiceUnavailable("outage") if fails else None)
        if stretch.is_done:
            self.finishing = None
            if isinstance(stretch.error, ServiceUnavailable):
                # The worker keeps the messages and tries again.
                self.waiting += [each.message for each in group]
            elif stretch.error is not None:
                raise Violation(f"finishing failed: {stretch.error!r}") from stretch.error
            else:
                self._sort_out(group)
        return note

    def can_revise(self) -> bool:
        return bool(self.late or self.late_alone) or self.revising is not None

    def revise(self, count: int, *, fails: bool) -> str:
        """Run one more script that revises decisions by the oldest late outcomes, or let the script fail, as in an outage."""
        if self.revising is None:
            source = self.late_alone or self.late
            group, alone = source[: 1 if self.late_alone else count], bool(self.late_alone)
            del source[: len(group)]
            ends = list[Revised | None]()
            late = [message.payload.late for message in group if message.payload.late]
            work = partial(self.reviser.revise, late, [None] * len(late), alone=alone)
            self.revising = group, ends, Stretch(lambda: ends.extend(work()))
        group, ends, stretch = self.revising
        note = f"{_named(group)}: {stretch.next_call or 'nothing to do'}{' fails' if fails else ''}"
        if not stretch.is_done:
            stretch.run_on(ServiceUnavailable("outage") if fails else None)
        if stretch.is_done:
            self.revising = None
            if isinstance(stretch.error, ServiceUnavailable):
                self.late += group
            elif stretch.error is not None:
                raise Violation(f"revising failed: {stretch.error!r}") from stretch.error
            for message, end in zip(group, ends, strict=False):
                self._end_late(message, end)
        return note

    def _end_late(self, message: Message, end: Revised | None) -> None:
        if end == "waits":
            # The message is acknowledged, because the ledger keeps the outcome until its trace is decided.
            self.in_flight.remove(message)
        else:
            self._end(message, end, self.late_alone, self.late)

    def _sort_out(self, ended: Sequence[Leased]) -> None:
        for message, case in ended:
            self._end(message, case.resolved, self.alone, self.waiting)

    def _end(self, message: Message, end: Resolved | None, alone: list[Message], held: list[Message]) -> None:
        match end:
            case None:
                alone.append(message)
            case TraceHeld():
                held.append(message)
            case TraceConflict():
                self._dead_letter(message, "conflict", "the id is taken")
            case TraceDead() as dead:
                self._dead_letter(message, dead.reason, dead.detail)
            case decision:
                self.ended.append(Ended(message, decision))

    def _dead_letter(self, message: Message, reason: Reason, detail: str) -> None:
        payload = message.payload
        self.ended.append(Ended(message, DeadLettering(reason, detail, payload.named_id, payload.digest)))

    def end(self, index: int) -> str:
        """Dead-letter a message or publish its decision, and then acknowledge the message."""
        message, end = self.ended.pop(index % len(self.ended))
        payload = message.payload
        published: Decision | None
        if isinstance(end, DeadLettering):
            published = self.letters.dead_letter(payload.raw, end._replace(deliveries=message.deliveries))
            note = f"{payload.header_id} buried as {end.reason}"
        else:
            published, note = end, f"{payload.header_id} published"
        if published is not None:
            made_for = self._books.made.get(published.model_dump_json().encode())
            if made_for != payload.digest:
                raise Violation(f"{payload.header_id}: a decision is published that was not made for what was submitted")
        self.in_flight.remove(message)
        return note

    def die(self) -> list[Message]:
        """Crash, and return the messages that were in flight."""
        if self.finishing:
            self.finishing[1].die()
        if self.revising:
            self.revising[2].die()
        return self.in_flight


def trace_in(message: Message) -> ReasoningTrace:
    assert message.payload.trace
    return message.payload.trace


def _named(messages: Sequence[Message]) -> list[str]:
    return [message.payload.header_id for message in messages]
