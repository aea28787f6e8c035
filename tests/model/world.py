"""Workers, producers and operators around one queue, and everything that may happen to them, one script at a time."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kp_scorer.gate.gate_audit import audit_gate
from kp_scorer.novelty.verification import audit

from tests.model.baton import Violation
from tests.model.compare import check_same
from tests.model.contents import IDS, KINDS, Payload, letter_id_of, payload_of
from tests.model.invariants import Invariants
from tests.model.operators import Operator, drop, forget, replay, resend_lost, submit
from tests.model.records import KEPT_MS, KEYS, RECORD_TTL_MS, RESEND_AFTER_MS, TRACE_LEASE_MS, WORKER_LEASE_MS
from tests.model.reference import Reference
from tests.model.reference_facts import BOUNDS, FACTS, KEPT_FACTS
from tests.model.reference_log import ERASED, HEAD, LOG, WINDOW
from tests.model.server import Image, Server
from tests.model.watched import Books, WatchedFacts, WatchedLedger, WatchedLog
from tests.model.workers import Message, Worker
from tests.support.gates import same_is_known

WORKERS: Final = 3
AUDIT_EVERY: Final = 20

MOVES_MS: Final = (
    *(1, 50, 1_000, WORKER_LEASE_MS - 1, WORKER_LEASE_MS + 1, 30_000, TRACE_LEASE_MS + 1, RESEND_AFTER_MS + 1),
    *(WINDOW.slack_ms + 1, WINDOW.ttl_ms + 1, RECORD_TTL_MS, KEPT_MS + 1),
)

T = TypeVar("T")


class Snapshot(NamedTuple):
    """The state that Redis falls back to: its keys, the model of them, and the messages that were not acknowledged."""

    image: Image
    model: Reference
    messages: Sequence[Message]


class World:
    """The whole model.

    Each action is a method: its numbers choose among what there is, and it returns a note of what it did.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.books = Books(server.client)
        server.clear(self.model.now)
        self.queue: list[Message] = []
        self.operators: list[Operator] = []
        self.workers = [Worker(self.books) for _ in range(WORKERS)]
        self.snapshot: Snapshot | None = None
        self._invariants = Invariants()
        self._steps = 0
        self._tainted: set[str] = set()

    @property
    def model(self) -> Reference:
        return self.books.model

    def check(self) -> None:
        dump = self._server.read()
        self._invariants.check(dump, self.model.now, self._has_message)
        check_same(dump, self.model)
        self._steps += 1
        if self._steps % AUDIT_EVERY == 0:
            self.audit()

    def audit(self) -> None:
        """Check that every decision follows from the log and the facts, and that all gates know the same."""
        log, ledger = WatchedLog(self.books).real, WatchedLedger(self.books).real
        report = audit(list(log.entries()), ledger.decided, WINDOW, lambda _done, _total: None)
        if differences := [difference for difference in report.differences if difference.entry not in self._tainted]:
            raise Violation(f"audit: {differences}")
        facts = WatchedFacts(self.books)
        if differing := audit_gate(list(facts.all()), list(facts.all_kept()), ledger.decided, BOUNDS).differences:
            raise Violation(f"audit of the gate: {differing}")
        anew = Worker(self.books).gate
        anew.catch_up()
        for worker in self.workers:
            if not worker.finishing:
                worker.gate.catch_up()
                if not same_is_known(worker.gate, anew):
                    raise Violation(f"{self._name(worker)} knows other facts than a worker that starts now")

    def close(self) -> None:
        """Let all workers and operators die, whatever they still have to do."""
        for operator in self.operators:
            operator.die()
        for worker in self.workers:
            worker.die()

    # Producers.

    def submit(self, content: int, kind: int) -> str:
        payload = _content(content, kind)
        return self._start(f"client submits {payload.header_id}", submit, payload, self._send)

    def send_foreign(self, content: int, kind: int) -> str:
        """Send a message to the queue as another producer does, without noting the submission."""
        payload = _content(content, kind)
        self._send(payload)
        return f"{payload.header_id}, {KINDS[kind % len(KINDS)]}"

    def duplicate(self, which: int, _: int) -> str:
        message = pick(self.queue, which)
        self.queue.append(Message(message.payload, message.deliveries))
        return message.payload.header_id

    # Workers.

    def take(self, which: int, count: int) -> str:
        for _ in range(min(1 + count % 3, len(self.queue))):
            pick(self.workers, which).take(self.queue.pop(0))
        return f"worker {which % WORKERS}"

    def take_strictly(self, which: int, number: int) -> str:
        """Let a worker with lower limits take a message that a client noted.

        The worker cannot decode it, or cannot even find its id.
        """
        message = next(message for message in self.queue if self._is_noted(message.payload))
        self.queue.remove(message)
        pick(self.workers, which).take_strictly(message, is_read=bool(number % 3))
        return f"worker {which % WORKERS}: {message.payload.header_id}, {'read' if number % 3 else 'not read'}"

    def begin(self, which: int, count: int) -> str:
        worker = pick([worker for worker in self.workers if worker.can_begin()], which)
        return f"{self._name(worker)}: {worker.begin(1 + count % 3, embedding_fails=False)}"

    def begin_badly(self, which: int, count: int) -> str:
        """Let a worker begin while its embedder fails."""
        worker = pick([worker for worker in self.workers if worker.can_begin()], which)
        note = f"{self._name(worker)}: {worker.begin(1 + count % 3, embedding_fails=True)}"
        if worker.is_hopeless:
            self.crash(self.workers.index(worker), 0)
        return note

    def finish(self, which: int, _: int) -> str:
        worker = pick([worker for worker in self.workers if worker.can_finish()], which)
        return f"{self._name(worker)}: {worker.finish(fails=False)}"

    def finish_badly(self, which: int, _: int) -> str:
        """Let the next script that finishes a group fail, as in an outage."""
        worker = pick([worker for worker in self.workers if worker.can_finish()], which)
        return f"{self._name(worker)}: {worker.finish(fails=True)}"

    def revise(self, which: int, count: int) -> str:
        worker = pick([worker for worker in self.workers if worker.can_revise()], which)
        return f"{self._name(worker)}: {worker.revise(1 + count % 3, fails=False)}"

    def revise_badly(self, which: int, count: int) -> str:
        """Let the next script of a revision fail, as in an outage."""
        worker = pick([worker for worker in self.workers if worker.can_revise()], which)
        return f"{self._name(worker)}: {worker.revise(1 + count % 3, fails=True)}"

    def end(self, which: int, index: int) -> str:
        worker = pick([worker for worker in self.workers if worker.ended], which)
        return f"{self._name(worker)}: {worker.end(index)}"

    def catch_up(self, which: int, _: int) -> str:
        """Let a worker that has nothing to finish read the log."""
        worker = pick([worker for worker in self.workers if not worker.finishing], which)
        worker.decider.refresh()
        return self._name(worker)

    def renew(self, which: int, _: int) -> str:
        pick(self.workers, which).ledger.renew()
        return f"worker {which % WORKERS}"

    def crash(self, which: int, _: int) -> str:
        """Let a worker die. The broker gives its messages to others, and a new worker takes its place."""
        index = which % WORKERS
        self.queue += self.workers[index].die()
        self.workers[index] = Worker(self.books)
        return f"worker {index}"

    # Operators, the resender among them.

    def resend_lost(self, _: int, __: int) -> str:
        return self._start("resender", resend_lost, lambda: not self.queue, self._send)

    def replay(self, which: int, _: int) -> str:
        return self._start("replay", replay, lambda count: which % count, self._send)

    def drop(self, which: int, _: int) -> str:
        return self._start("drop", drop, lambda count: which % count)

    def forget(self, which: int, _: int) -> str:
        return self._start(f"forget {pick(IDS, which)}", forget, pick(IDS, which))

    def go_on(self, which: int, _: int) -> str:
        operator = pick(self.operators, which)
        # An operator never reads and then acts within the same millisecond.
        self.move(1, stalled=-1)
        note = operator.go_on()
        if operator.is_done:
            self.operators.remove(operator)
        return note

    def interrupt(self, which: int, _: int) -> str:
        """Let an operator be interrupted, or die."""
        operator = pick(self.operators, which)
        operator.die()
        self.operators.remove(operator)
        return f"{operator.name}, before it could {operator.next_call}"

    # Time and Redis.

    def move_time(self, amount: int, stalled: int) -> str:
        """Let time go on. All workers renew their leases, except for those that are stalled."""
        self.move(pick(MOVES_MS, amount), stalled)
        return f"{pick(MOVES_MS, amount)} ms, {[index for index in range(WORKERS) if stalled >> index & 1]} stalled"

    def expire(self, which: int, _: int) -> str:
        """Let the record of a trace that has ended expire early, as if the settings gave it a shorter life."""
        trace_id = pick(self.ended_ids(), which)
        self._lose([KEYS.record(trace_id)])
        return trace_id

    def clear(self, _: int, __: int) -> str:
        """Empty the novelty log.

        Time goes on before, so that the new log has no entry in the same millisecond as the old one.
        """
        self.move(1, stalled=-1)
        WatchedLog(self.books).real.clear()
        WatchedFacts(self.books).clear()
        self._lose([LOG, HEAD, ERASED, FACTS, KEPT_FACTS])
        return ""

    def remember(self, _: int, __: int) -> str:
        """Let Redis save its data. With Redis as the broker, that includes unacknowledged messages."""
        unacknowledged = [message for worker in self.workers for message in worker.in_flight]
        messages = [Message(message.payload, message.deliveries) for message in (*self.queue, *unacknowledged)]
        self.snapshot = Snapshot(self._server.image(), deepcopy(self.model), messages)
        return ""

    def come_back(self, _: int, __: int) -> str:
        """Let Redis return with the data that it saved; messages that were acknowledged since come again.

        Some things cannot survive this. A decision made since may be made again, with another result. A submission since is
        lost with its message, unless a worker or an operator holds it. An erasure since has not happened.
        """
        assert self.snapshot
        now, serials = self.model.now + 1_000, self.model.serials
        self.books.model = deepcopy(self.snapshot.model)
        self.model.now, self.model.serials = now, serials
        self._server.put_back(self.snapshot.image, now)
        self._lose(self.model.due())
        self.queue = [Message(message.payload, message.deliveries) for message in self.snapshot.messages]
        # Traces that were decided since may get a different decision now.
        self._invariants = Invariants()
        for place, expected in (each for worker in self.workers for each in worker.log.expected.items()):
            if self.model.log.at(place) is None or self.model.log.similarity(place) != expected:
                self._tainted.add(place)
        return ""

    # Helpers of the actions.

    def _start(self, name: str, work: Callable[..., None], *arguments: object) -> str:
        self.operators.append(Operator(name, partial(work, self.books, *arguments)))
        return name

    def _send(self, payload: Payload) -> None:
        self.queue.append(Message(payload))

    def move(self, amount_ms: int, stalled: int) -> None:
        """Let ``amount_ms`` pass. Workers renew their leases, except for those whose bit in ``stalled`` is set."""
        self.model.now += amount_ms
        self._server.set_time(self.model.now)
        self._lose(self.model.due())
        for index, worker in enumerate(self.workers):
            if not stalled >> index & 1:
                worker.ledger.renew()

    def _lose(self, keys: list[str]) -> None:
        for key in keys:
            self.model.lose(key)
        self._server.delete(keys)

    def ended_ids(self) -> list[str]:
        """Return the ids of the traces whose records may expire."""
        return [trace_id for trace_id, record in self.model.records.items() if record.state in ("decided", "dead")]

    def has_noted(self) -> bool:
        """Return whether the queue holds a message whose submission a client has noted."""
        return any(self._is_noted(message.payload) for message in self.queue)

    def _is_noted(self, payload: Payload) -> bool:
        return self.model.record(payload.header_id).as_letter.endswith(letter_id_of(payload.raw).encode())

    def _name(self, worker: Worker) -> str:
        return f"worker {self.workers.index(worker)}"

    def _has_message(self, trace_id: str, digest: bytes) -> bool:
        messages = (*self.queue, *(message for worker in self.workers for message in worker.in_flight))
        return any(message.payload.header_id == trace_id and message.payload.digest == digest for message in messages)


def pick(options: Sequence[T], number: int) -> T:
    return options[number % len(options)]


def _content(content: int, kind: int) -> Payload:
    return payload_of(pick(IDS, content), pick(KINDS, kind))
