"""When messages become dead letters, each is matched to its submission, and can be shown."""

import itertools
import json
import pickle
from collections.abc import Callable
from typing import Any, Final

import pytest
from kombu.message import Message
from kp_scorer.broker.calls import declare_queues, with_producer
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.dead_queue import dead_letter, poison
from kp_scorer.broker.queues import results_queue
from kp_scorer.broker.wire import TASK_NAME, parse_submission, task_body
from kp_scorer.decision import Decision
from kp_scorer.limits import Limits
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.records import Identity, Submission, SubmissionCounts, dead_letter_id_of

from tests.support.attacks import GZIP, bombs
from tests.support.builders import decision_on, decode_json, minimal_payload, store_decisions
from tests.support.calls import traced_memory
from tests.support.changed_settings import SettingsWith
from tests.support.commands import command
from tests.support.outcomes import published
from tests.support.traces import fresh_samples

TRACE_ID: Final = "kp:trace:minimal"
STRICT: Final = Limits(steps=1)
STRICTER: Final = Limits(values=1)

DeadLetterBy = Callable[[Store, Any], Decision | None]


def submission(**changed: Any) -> bytes:
    """Return a valid trace as our client sends it, in bytes that no other serializer would write."""
    unknown: dict[str, Any] = {"unknown": [{}] * 100}
    return json.dumps(minimal_payload() | unknown | changed, separators=(", ", ":"), ensure_ascii=False).encode()


def message(body: bytes, **headers: str) -> Any:
    return Message(body=body, content_type="application/json", headers=headers, delivery_info={})


def call(payload: bytes) -> Any:
    return message(task_body(payload), task=TASK_NAME, id=TRACE_ID)


def digest_of(payload: bytes) -> bytes:
    return decode_json(payload, Limits()).digest()


@pytest.fixture
def noted(store: Store) -> bytes:
    """A valid trace whose submission a client has noted in the ledger."""
    payload = submission()
    assert store.ledger.submit([Submission(TRACE_ID, digest_of(payload), payload)]) == ["pending"]
    return payload


def refused(store: Store, sent: Any) -> Decision | None:
    """Dead-letter a message like a worker that parses it and whose limits it exceeds."""
    return dead_letter(store.dead_letters, sent, DeadLettering("invalid", "steps: too many", TRACE_ID), STRICT)


def unread(store: Store, sent: Any) -> Decision | None:
    """Dead-letter a message like a worker that cannot parse it."""
    return dead_letter(store.dead_letters, sent, DeadLettering("invalid", "$: too many values", TRACE_ID), STRICTER)


def poisonous(store: Store, sent: Any) -> Decision | None:
    """Dead-letter a message like a worker that finds too many attempts in its record."""
    why = DeadLettering("poison", "5 workers died", TRACE_ID, digest_of(submission()))
    return dead_letter(store.dead_letters, sent, why, Limits())


def poisonous_unread(store: Store, sent: Any) -> Decision | None:
    """Dead-letter a message like a worker that does not read it, because others have died of it."""
    return dead_letter(store.dead_letters, sent, poison(sent, 5), Limits())


def failed(store: Store, sent: Any) -> Decision | None:
    why = DeadLettering("scoring_failed", "ValueError", TRACE_ID, digest_of(submission()))
    return dead_letter(store.dead_letters, sent, why, Limits())


def lost(store: Store, _: Any) -> Decision | None:
    """Dead-letter a submission like the resender, which has only what the client noted."""
    payload = submission()
    return store.dead_letters.dead_letter(
        payload, DeadLettering("lost", "sent 4 times", TRACE_ID, digest_of(payload), deliveries=0)
    )


WAYS: Final = (refused, unread, poisonous, failed, lost)

Send = Callable[[bytes], Any]
# A bare trace that nobody has parsed has no id, so ``poisonous_unread`` cannot match it.
FORMS: Final = {"call": (call, [*WAYS, poisonous_unread]), "plain trace": (message, WAYS)}


def state_of(store: Store, trace_id: str = TRACE_ID) -> str:
    (record,) = store.ledger.look_up([trace_id])
    return record.state if record else ""


def test_a_submission_that_is_large_for_its_escapes_and_spaces_is_recognised(store: Store) -> None:
    limits = Limits(message_bytes=2_000)
    small = submission(unknown=["\u00e9" * 400])
    large = json.dumps(json.loads(small), indent=8).encode()
    assert len(small) < limits.message_bytes < len(large)
    store.ledger.acquire([Identity(TRACE_ID, digest_of(small))])
    why = DeadLettering("scoring_failed", "ValueError", TRACE_ID, digest_of(small))
    assert dead_letter(store.dead_letters, message(large), why, limits) is None
    (stored,) = store.dead_letters.read()
    assert parse_submission(store.dead_letters.payload(stored.letter_id), limits) == json.loads(small)
    assert state_of(store) == "dead"
    assert store.ledger.counts() == SubmissionCounts(submitted=1, pending=0, decided=0, dead=1)


@pytest.mark.parametrize(
    ("send", "first", "then"),
    [
        pytest.param(send, first, then, id=f"{name}, {first.__name__} and {then.__name__}")
        for name, (send, ways) in FORMS.items()
        for first, then in itertools.product(ways, repeat=2)
    ],
)
def test_a_submission_has_one_dead_letter(
    store: Store, noted: bytes, first: DeadLetterBy, then: DeadLetterBy, send: Send
) -> None:
    for dead_letter_by in (first, then):
        assert dead_letter_by(store, send(noted)) is None
        (stored,) = store.dead_letters.read()
        assert store.dead_letters.payload(stored.letter_id) == noted
        assert stored.trace_id == TRACE_ID
        assert state_of(store) == "dead"
        assert store.ledger.counts() == SubmissionCounts(submitted=1, pending=0, decided=0, dead=1)
    assert store.dead_letters.drop(stored)
    assert state_of(store) == ""


@pytest.mark.parametrize(("send", "dead_letter_by"), [(send, way) for send, ways in FORMS.values() for way in ways])
def test_a_copy_of_a_decided_trace_leads_to_the_decision(
    store: Store, noted: bytes, dead_letter_by: DeadLetterBy, send: Send
) -> None:
    store_decisions(store, {TRACE_ID: decision_on(TRACE_ID)}, digest_of(noted))
    decision = dead_letter_by(store, send(noted))
    assert decision
    assert decision.trace_id == TRACE_ID
    assert list(store.dead_letters.read()) == []
    assert store.ledger.counts() == SubmissionCounts(submitted=1, pending=0, decided=1, dead=0)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"metadata": minimal_payload()["metadata"] | {"success": 1}}, id="1 for true"),
        pytest.param({"steps": [{"step_id": 0.0, "type": "thought"}, {"step_id": 1, "type": "observation"}]}, id="0.0 for 0"),
        pytest.param(
            {"steps": [{"step_id": False, "type": "thought"}, {"step_id": 1, "type": "observation"}]}, id="false for 0"
        ),
        pytest.param({"steps": []}, id="another content"),
    ],
)
def test_another_submission_of_the_same_id_leaves_the_first_pending(
    store: Store, noted: bytes, changed: dict[str, Any]
) -> None:
    another = submission(**changed)
    assert another != noted
    assert refused(store, call(another)) is None
    assert state_of(store) == "pending"
    (stored,) = store.dead_letters.read()
    assert store.dead_letters.payload(stored.letter_id) == another
    assert store.ledger.counts() == SubmissionCounts(submitted=2, pending=1, decided=0, dead=1)


def test_a_dead_letter_of_a_call_by_others_has_its_argument(store: Store) -> None:
    trace = {"note": "\u00e9", "steps": []}
    for body in (
        json.dumps([[trace], {}, {"callbacks": None}]),
        json.dumps([[], {"trace": trace}, {}]),
        json.dumps({"args": [trace], "kwargs": {}}),
    ):
        assert refused(store, message(body.encode(), task=TASK_NAME)) is None
    (stored,) = store.dead_letters.read()
    assert json.loads(store.dead_letters.payload(stored.letter_id)) == trace
    others = {b"[[1, 2], {}, {}]", b"[[], {}, {}]", b"[[1], {}", b"[[]], {}, {}]"}
    for raw in others:
        assert poisonous(store, message(raw, task=TASK_NAME)) is None
    payloads = {store.dead_letters.payload(each.letter_id) for each in store.dead_letters.read()}
    assert others < payloads


def test_bytes_that_are_not_parsed_end_no_other_submission(store: Store) -> None:
    (trace,) = fresh_samples(1)
    trace_id, payload = str(trace["id"]), json.dumps(trace, ensure_ascii=False).encode()
    store.ledger.submit([Submission(trace_id, b"d" * 16, payload)])

    def state_after(body: bytes) -> str:
        dead_letter(store.dead_letters, message(body), DeadLettering("invalid", "too large", trace_id), STRICTER)
        return state_of(store, trace_id)

    others = [[trace, trace], [trace | {"mood": 1}], [[trace]], [], [payload.decode()]]
    # The last call has the right trace, but is refused for something beside it.
    calls = [json.dumps([args, {}, {}]).encode() for args in others]
    # A bare trace in other bytes may have other content.
    for body in [*calls, b'[[%s], {}, {"chain": 1}]' % payload, payload + b" "]:
        assert state_after(body) == "pending"
    assert state_after(task_body(payload)) == "dead"
    assert store.dead_letters.payload(dead_letter_id_of(payload)) == payload


NO_PLAIN_JSON = [
    *(b"[" * depth + b"]" * depth for depth in (33, *range(930, 1_000), 100_000)),
    b'[[{"a":NaN}],{},null]',
    b"[Infinity]",
    b"[-Infinity]",
    b'{"b":1e999}',
    b'["\\ud800"]',
    b"[" + b"1" * 5_000 + b"]",
    b"[" + b"{}," * 20_000 + b"0]",
    b"\xff\xfe",
    "[1]".encode("utf-16"),
    b"",
]


def payloads_of_show(settings: Settings) -> list[Any]:
    """Return the payload of each dead letter, as ``dead-letter show`` prints it."""

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    done = command(settings, "dead-letter", "show")
    return [json.loads(line, parse_constant=refuse)["payload"] for line in done.stdout.splitlines()]


def test_payload_is_shown_as_json_or_else_as_text(settings: Settings, store: Store) -> None:
    plain = [minimal_payload(), [1.5, None, "x" * 200_000], {"a": {"b": ["\u2028", -1]}}]
    for payload in [*NO_PLAIN_JSON, *(json.dumps(content).encode() for content in plain)]:
        store.dead_letters.dead_letter(payload, DeadLettering("malformed", "message: expected a task"))
    texts = {payload.decode("utf-8", "backslashreplace") for payload in NO_PLAIN_JSON}
    payloads = payloads_of_show(settings)
    assert {content for content in payloads if isinstance(content, str)} == texts
    # Letters of the same millisecond may come in any order.
    assert sorted(map(repr, (content for content in payloads if not isinstance(content, str)))) == sorted(map(repr, plain))


def test_showing_many_values_takes_memory_for_the_bytes_only(settings: Settings, store: Store) -> None:
    payload = b'["a' + b'",{},"' * 1_000_000 + b'"]'
    store.dead_letters.dead_letter(payload, DeadLettering("malformed", "message: expected a smaller one"))
    with traced_memory() as memory:
        (payloads,) = payloads_of_show(settings)
    assert payloads == payload.decode()
    assert memory.peak_bytes < 10 * len(payload)


FOREIGN: list[tuple[bytes, dict[str, Any]]] = [
    (pickle.dumps({"a": "pickle"}), {"content_type": "application/x-python-serialize", "content_encoding": "binary"}),
    (b"\xff\xfe\x00", {"content_type": "application/json", "content_encoding": "utf-8"}),
    (b"[1]", {"content_type": "application/json", "content_encoding": "utf-8"}),
    (b'{"trace_id":"kp:trace:another"}', {"content_type": "application/json", "content_encoding": "utf-8"}),
    *(
        (decision_on("kp:trace:another")[:-1] + b',"more":%s}' % more, {"content_type": "application/json"})
        for more in (b"NaN", b"-Infinity", b"1e999", b"[" * 950 + b"]" * 950)
    ),
    (b"not compressed", {"content_type": "application/json", "headers": {"compression": GZIP}}),
]


def test_a_message_that_is_no_decision_becomes_a_dead_letter_and_blocks_no_other(on_broker: SettingsWith, store: Store) -> None:
    settings = on_broker()
    foreign = [*FOREIGN, (bombs()[GZIP], {"content_type": "application/json", "headers": {"compression": GZIP}})]
    queue = results_queue(settings, "accepted")
    with make_celery(settings) as app:
        declare_queues(app, [queue])
        for body, properties in [*foreign, (decision_on("kp:trace:one"), {"content_type": "application/json"})]:
            message = {"body": body, "exchange": "", "routing_key": queue.name, **properties}
            with_producer(app, "test", lambda producer, message=message: producer.publish(**message))  # type: ignore[misc]
    with traced_memory() as memory:
        assert [decision["trace_id"] for decision in published(settings)] == ["kp:trace:one"]
    assert memory.peak_bytes < 2**26, "a message was unpacked"
    assert published(settings) == []
    letters = list(store.dead_letters.read())
    assert {store.dead_letters.payload(letter.letter_id) for letter in letters} == {body for body, _ in foreign}
    assert {(letter.reason, letter.detail) for letter in letters} == {("malformed", f"queue {queue.name}: expected a decision")}
