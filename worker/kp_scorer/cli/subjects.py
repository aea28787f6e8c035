"""Finds everything in Redis that belongs to an agent or to a namespace."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import click
from celery import Celery

from kp_scorer.adapters.attributes import SERVICE, attributes_of_run
from kp_scorer.broker.queues import results_queues, results_streams
from kp_scorer.broker.searching import count_in_flight, search_queue
from kp_scorer.broker.wire import trace_id_of
from kp_scorer.cli.options import Command
from kp_scorer.cli.output import note_count, print_note
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import check_values
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLetter
from kp_scorer.store.runs import MOST_VALUES, ClaimedRun
from kp_scorer.trace import OUTCOME_ID_PREFIX, TRACE_ID_PREFIX, namespace_of

_ENTRIES_AT_ONCE: Final = 1_000
_SHOWN_EVERY: Final = 1_000


class Owner(NamedTuple):
    """The trace and the agent that some content belongs to; either is empty if the content does not name it."""

    trace_id: str = ""
    agent: object = ""


class Subject(NamedTuple):
    """An agent or a namespace; the other is empty."""

    agent: str
    namespace: str

    def owns(self, owner: Owner) -> bool:
        """Return whether this owner's content belongs to the subject."""
        return namespace_of(owner.trace_id) == self.namespace if self.namespace else owner.agent == self.agent


def subject_options(command: Command) -> Command:
    """Add the options that name a subject, and pass the command the ``subject``, which is None if neither is given."""

    @click.option("--agent", metavar="ID", default="", help="All data of traces with this metadata.agent_id.")
    @click.option("--namespace", metavar="NAME", default="", help="All data of traces with this namespace in their id.")
    @wraps(command)
    def with_subject(agent: str, namespace: str, **options: Any) -> int | None:
        if agent and namespace:
            raise click.UsageError("expected either --agent or --namespace")
        return command(subject=Subject(agent, namespace) if agent or namespace else None, **options)

    return with_subject


@dataclass(slots=True)
class Search:
    """Searches every place in Redis for the data of a subject, in chunks. An item may come twice if it changes meanwhile."""

    store: Store
    app: Celery
    settings: Settings
    subject: Subject
    advance: Callable[[int, int | None], None]  # Called now and then with the number of items that were searched.
    searched: int = 0
    unread: int = 0  # The number of dead letters so far that do not say whose they are.

    def records(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the subject's records of traces and of late outcomes, each with its id."""
        namespace = self.subject.namespace
        for part in (f"{TRACE_ID_PREFIX}{namespace}:", OUTCOME_ID_PREFIX) if namespace else ("",):
            for trace_id, fields in self.store.ledger.records(part=part):
                if self._owns(self._owner_of_record(trace_id, fields)):
                    yield trace_id, fields

    def vectors(self) -> Iterator[tuple[str, str, str, Any]]:
        """Yield space, place, trace id and vector of the subject's entries in novelty logs, and of its facts of gates.

        Only the records of the traces tell which of these belong to an agent.
        """
        for log in self.store.novelty_logs():
            yield from self._owned(log.space, ((str(each.place), each.trace_id, each.vector) for each in log.entries()))
        for facts in self.store.all_facts():
            stored = chain(facts.all(), facts.all_kept())
            rows = ((str(each.place), each.fact.trace_id, each.fact.vector) for each in stored if each.fact)
            yield from self._owned(facts.space, rows)

    def _owned(self, space: str, rows: Iterator[tuple[str, str, Any]]) -> Iterator[tuple[str, str, str, Any]]:
        while chunk := list(islice(rows, _ENTRIES_AT_ONCE)):
            ids = {trace_id for _, trace_id, _ in chunk if trace_id}
            owners: dict[str, object] = dict.fromkeys(ids, "")
            if self.subject.agent:
                owners |= {each: self._owner_of_record(each, fields).agent for each, fields in self.store.ledger.records(ids)}
            for place, trace_id, vector in chunk:
                if trace_id and self._owns(Owner(trace_id, owners[trace_id])):
                    yield space, place, trace_id, vector

    def dead_letters(self) -> Iterator[tuple[str, DeadLetter, bytes]]:
        """Yield the subject's dead letters, each with the id of its trace, which may be empty, and its content."""
        for letter in self.store.dead_letters.read():
            payload = self.store.dead_letters.payload(letter.letter_id)
            content = _parsed(payload)
            owner = self._owner(content)
            owner = owner._replace(trace_id=owner.trace_id or letter.trace_id)
            if self._owns(owner):
                yield owner.trace_id, letter, payload
            elif content is None or not owner.trace_id:
                self.unread += 1

    def runs(self) -> Iterator[ClaimedRun]:
        """Yield the subject's runs that are being collected or kept."""
        for run in self.store.runs.collected():
            if self._owns(Owner(run.trace_id, owner_of(_parsed(run.export)).agent)):
                yield run

    def messages(self, *, remove: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield the subject's messages on queues in Redis and on streams, each with its place; with ``remove``, remove them."""
        settings = self.settings
        if settings.broker.is_redis:
            for name in [*settings.queues.traces, *results_queues(settings, settings.kinds)]:
                for content in search_queue(self.app, name, settings.limits, self._is_owned, remove=remove):
                    yield name, content
        for name in results_streams(settings, settings.kinds):
            stream = self.store.decision_stream(name)
            for entry, decision in stream.entries():
                if self._is_owned(content := _parsed(decision)):
                    if remove:
                        stream.remove(entry)
                    yield name, content

    def note_unsearched(self) -> None:
        """Print which places may hold data of the subject and were not searched."""
        note_count(self.unread, "dead letters do not say whose they are: look at them by `kp-scorer dead-letter show`")
        if not self.settings.broker.is_redis:
            print_note("the queues of RabbitMQ are not searched: what waits there is scored, or read by others")
            return
        for name in [*self.settings.queues.traces, *results_queues(self.settings, self.settings.kinds)]:
            searched_later = f"messages of {name} are in flight and were not searched: repeat this once they are done"
            note_count(count_in_flight(self.app, name), searched_later)

    def _owns(self, owner: Owner) -> bool:
        self.searched += 1
        if not self.searched % _SHOWN_EVERY:
            self.advance(self.searched, None)
        return self.subject.owns(owner)

    def _is_owned(self, content: object) -> bool:
        return self._owns(self._owner(content))

    def _owner(self, content: object) -> Owner:
        owner = owner_of(content)
        if self.subject.agent and isinstance(content, dict) and content.get("@type") == "LateOutcome":
            # Only the record of its trace tells whose a late outcome is.
            for trace_id, fields in self.store.ledger.records([owner.trace_id]):
                return self._owner_of_record(trace_id, fields)
        return owner

    def _owner_of_record(self, record_id: str, fields: dict[str, str]) -> Owner:
        text, is_outcome = fields.get("decision") or fields.get("submission") or "", record_id.startswith(OUTCOME_ID_PREFIX)
        # JSON without escapes contains each text as it is, so most records need no parsing, which would take twice as long.
        is_of_others = text and self.subject.agent not in text and "\\" not in text
        if not is_outcome and (self.subject.namespace or is_of_others):
            return Owner(record_id)
        # Only the dead letter tells whose a dead trace is.
        content = text.encode() or self.store.dead_letters.payload(fields.get("letter", ""))
        owner = self._owner(_parsed(content))
        return owner if is_outcome else Owner(record_id, owner.agent)


def owner_of(content: object) -> Owner:
    """Return the owner of a submission, a late outcome, a decision, or an export of spans."""
    if not isinstance(content, dict):
        return Owner()
    # A trace may have a field ``trace_id`` too, as it may have any additional field.
    if content.get("@type") != "ReasoningTrace" and isinstance(trace_id := content.get("trace_id"), str):
        return Owner(trace_id, content.get("agent_id"))
    if "resourceSpans" in content:
        try:
            return Owner("", attributes_of_run(content["resourceSpans"][0]["scopeSpans"][0]["spans"]).get(SERVICE))
        except (LookupError, TypeError, AttributeError):
            return Owner()
    metadata = content.get("metadata")
    return Owner(trace_id_of(content), metadata.get("agent_id") if isinstance(metadata, dict) else "")


def _parsed(payload: bytes) -> Any:
    """Parse a payload as JSON; return None if it is something else, or has too many values."""
    try:
        check_values(payload, MOST_VALUES)
        return json.loads(payload)
    except (InvalidTrace, ValueError, RecursionError):
        return None
