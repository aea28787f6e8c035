"""``read_decisions`` yields each decision once, however it is published and whatever happens to reader and servers."""

import json
import math
import os
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import redis
from kp_scorer import Decision, ServiceUnavailable, read_decisions
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.headers import PACKED_BY
from kp_scorer.broker.results import Publisher
from kp_scorer.decision import CheckResult
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store

from tests.support.builders import Payload, decided, make_trace, minimal_payload, steps
from tests.support.calls import traced_memory
from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S, at_work, opened, wait_until
from tests.support.proxy import Proxy
from tests.support.traces import short_traces

STREAMS: Final = {"results__via": "stream"}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "redis queue": {},
    "redis stream": STREAMS,
    "rabbitmq queue": {},
    "rabbitmq stream": STREAMS,
}
COUNT: Final = 6


@pytest.fixture(params=WAYS)
def settings_of(request: pytest.FixtureRequest) -> SettingsWith:
    """A function that returns settings for one way of publishing: ``settings_of(results__with_trace=True)``."""
    changed = {"broker__visibility_timeout_s": 3, **WAYS[request.param]}
    if request.param.startswith("rabbitmq"):
        return partial(request.getfixturevalue("rabbitmq").settings, **changed)
    return partial(with_changed, request.getfixturevalue("settings"), **changed)


def decisions(count: int) -> list[Decision]:
    """Return decisions, all of them rejected."""
    return [decided(make_trace(trace_id=f"kp:trace:{number}")) for number in range(count)]


def accepted(count: int) -> list[Decision]:
    return [each.model_copy(update={"outcome": "accepted"}) for each in decisions(count)]


def publish(
    settings: Settings, made: Sequence[Decision], message: Any = None, dropped: Counter[str] | None = None
) -> list[bool]:
    """Publish decisions, and return for each whether that succeeded; count what full queues drop."""
    dropped = Counter() if dropped is None else dropped
    with make_celery(settings) as app, Store.open(settings) as store:
        publisher = Publisher(app, settings, store, lambda name, count: dropped.update({name: count}))
        errors = publisher.publish_all([publisher.publication(each, {}, message, set()) for each in made])
        assert publisher.full() == ({settings.queues.name("accepted")} if any(errors) else set())
        return [error is None for error in errors]


def message_with(payload: Payload, **headers: str) -> SimpleNamespace:
    """Return a submission with this trace, in the form of kombu's messages."""
    return SimpleNamespace(body=json.dumps(payload).encode(), content_type="application/json", headers=headers, properties={})


def read(settings: Settings, **arguments: Any) -> Generator[Decision]:
    return cast("Generator[Decision]", read_decisions(settings=settings, group="books", follow=False, **arguments))


def ids_of(made: Iterable[Decision]) -> list[str]:
    return [decision.trace_id for decision in made]


def test_decisions_whose_body_does_not_finish_are_delivered_again_and_copies_are_dropped(settings_of: SettingsWith) -> None:
    settings, made = settings_of(), decisions(COUNT)
    assert all(publish(settings, [*made[:3], *made]))
    with closing(read(settings)) as reader:
        # The reader stops while the caller works on the second decision.
        assert ids_of(islice(reader, 2)) == ids_of(made[:2])
    received: list[str] = []

    def is_all_read() -> bool:
        received.extend(ids_of(read(settings)))
        return len(received) >= COUNT

    wait_until(is_all_read)
    assert sorted(received) == ids_of(made)
    assert list(read(settings)) == []


def test_reading_goes_on_after_an_outage_until_it_is_told_to_stop(on_broker: SettingsWith) -> None:
    settings = on_broker()
    made, stopping = decisions(COUNT), threading.Event()
    received: list[str] = []
    with Proxy(settings.broker.url) as proxy:
        urls = {"broker__url": proxy.url, "redis__url": proxy.url if settings.broker.is_redis else settings.redis.url}
        through = with_changed(settings, **urls, broker__timeout_s=2.0)

        def run() -> None:
            received.extend(decision.trace_id for decision in read_decisions(settings=through, stopping=stopping))

        reader = threading.Thread(target=run)
        reader.start()
        publish(settings, made[:3])
        wait_until(lambda: len(received) == 3)
        proxy.refuse()
        publish(settings, made[3:])
        proxy.accept()
        wait_until(lambda: len(received) >= COUNT)
        stopping.set()
        reader.join(20)
    assert not reader.is_alive()
    assert sorted(received) == ids_of(made)


def test_readers_that_start_together_share_a_new_group(
    settings: Settings, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, made = with_changed(settings, **STREAMS), decisions(2)
    publish(streams, made)
    create = redis.Redis.xgroup_create

    def create_second(client: redis.Redis, name: str, *args: Any, **kwargs: Any) -> Any:
        create(redis_client, name, *args, **kwargs)
        return create(client, name, *args, **kwargs)

    monkeypatch.setattr(redis.Redis, "xgroup_create", create_second)
    assert [each.trace_id for each in read(streams)] == ids_of(made)


def test_a_server_that_was_never_reached_is_an_error(settings: Settings) -> None:
    nowhere = with_changed(settings, broker__url="redis://127.0.0.1:1/0", redis__url="redis://127.0.0.1:1/0")
    with pytest.raises(ServiceUnavailable):
        next(read_decisions(settings=nowhere))


def test_a_consumer_gets_entries_that_a_dead_one_did_not_acknowledge(
    settings: Settings, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = with_changed(settings, **STREAMS)
    publish(streams, decisions(2))
    broken = redis_client.xadd("decisions.rejected", {"decision": "[]"})
    with closing(read(streams)) as reader:
        next(reader)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert list(read(streams)) == []
    pending: Any = redis_client.xpending_range("decisions.rejected", "books", "-", "+", 10)
    entries = [each["message_id"] for each in pending]
    assert broken in entries
    redis_client.xclaim("decisions.rejected", "books", "gone", 0, entries, idle=60_000)
    assert ids_of(read(streams)) == ids_of(decisions(2))
    with Store.open(streams) as store:
        assert [each.detail for each in store.dead_letters.read()] == ["queue decisions.rejected: expected a decision"]
    left: Any = redis_client.xpending("decisions.rejected", "books")
    assert left["pending"] == 0


def foreign(payload: Payload) -> Payload:
    """Return a trace with fields that the schema does not define."""
    metadata = payload["metadata"] | {"run": "nightly", "quality_score": 0.99}
    return payload | {"source": {"id": "abc", "cost": 0.25}, "metadata": metadata}


def test_workers_send_the_trace_along(settings_of: SettingsWith, tmp_path: Path) -> None:
    settings = settings_of(results__with_trace=True, scoring__threshold=0.4)
    traces = {payload["id"]: foreign(payload) for payload in short_traces(20, seed=21)}
    odd = foreign(short_traces(1, seed=3)[0]) | {"id": "kp:trace:odd", "ratio": math.nan}
    received: dict[str, Decision] = {}

    def is_all_read() -> bool:
        received.update({decision.trace_id: decision for decision in read(settings)})
        return len(received) == 21

    with at_work(settings, tmp_path) as (_, client):
        assert len(client.submit_many([*traces.values(), odd])) == 21
        wait_until(is_all_read)
        # The ledger stores decisions without their traces.
        stored = [status and status.decision for status in client.look_up(list(traces))]
    assert all(decision and decision.trace is None for decision in stored)
    # Values that other programs cannot parse are left out, as are all fields that no worker reads.
    carried = received.pop("kp:trace:odd").trace or {}
    assert ("ratio" in carried, "source" in carried, carried["id"]) == (False, False, "kp:trace:odd")
    for trace_id, decision in received.items():
        expected = traces[trace_id]
        assert decision.trace == expected | {"metadata": expected["metadata"] | {"quality_score": decision.score}}


def test_a_checked_trace_goes_along_without_fields_that_no_check_has_seen(settings: Settings) -> None:
    traced, payload = with_changed(settings, results__with_trace=True), foreign(minimal_payload())
    checked = [each.model_copy(update={"checks": (CheckResult(name="clinic", version="3.1"),)}) for each in decisions(1)]
    publish(traced, checked, message_with(payload))
    (decision,) = read(traced)
    assert decision.trace
    assert decision.trace.keys() == payload.keys() - {"source"}
    assert "run" not in decision.trace["metadata"]


def test_unread_traces_are_bounded_by_bytes(settings_of: SettingsWith) -> None:
    settings = settings_of(results__with_trace=True, queues__results_limit=120)
    large = message_with(minimal_payload(objective="x" * 90_000))
    made = accepted(12)
    assert publish(settings, made[:1], large) == [True]
    published: list[bool] = []
    while published.count(False) == 0:
        published += publish(settings, made[len(published) :][:1], large)
    assert 1 <= sum(published) <= 5
    assert {len(decision.trace["task"]["objective"]) for decision in read(settings) if decision.trace} == {90_000}
    wait_until(lambda: publish(settings, made[:1], large) == [True])


def test_a_ring_keeps_the_newest_rejected_decisions_and_counts_the_others(settings_of: SettingsWith) -> None:
    settings = settings_of(queues__results_limit=2)
    made, dropped = decisions(COUNT), Counter[str]()
    for part in (made[:1], made[1:2], made[2:]):
        assert all(publish(settings, part, dropped=dropped))
    assert ids_of(read(settings)) == ids_of(made[-2:])
    assert +dropped == {settings.queues.name("rejected"): COUNT - 2}


def test_a_ring_keeps_the_newest_traces_that_fit_into_its_bytes(settings_of: SettingsWith) -> None:
    settings = settings_of(results__with_trace=True, queues__results_limit=120)
    large = message_with(minimal_payload(objective="x" * 90_000))
    made = decisions(12)
    for each in made:
        assert publish(settings, [each], large) == [True]
    left = ids_of(read(settings))
    assert 1 <= len(left) <= 4
    assert left == ids_of(made[-len(left) :])
    larger = message_with(minimal_payload(objective="x" * 400_000))
    assert publish(settings, made[:1], larger) == [True]
    if not settings.broker.is_redis and settings.results.via == "queue":
        # RabbitMQ drops a message that exceeds the limit even if it is alone on the queue.
        return
    assert ids_of(read(settings)) == ids_of(made[:1])


def test_packed_submissions_are_sent_along_unpacked_a_few_at_once(settings: Settings) -> None:
    traced = with_changed(settings, results__with_trace=True)
    packed = message_with(minimal_payload(objective="x" * 90_000, steps=steps(*["thought"] * 500)), **{PACKED_BY: "gzip"})
    packed.body = zlib.compress(packed.body)
    made = decisions(40)
    with traced_memory() as memory:
        assert all(publish(traced, made, packed))
    received = list(read(traced))
    assert len(received) == 40
    assert {len(decision.trace["task"]["objective"]) for decision in received if decision.trace} == {90_000}
    # All traces at once would be 5 MB of JSON, of which memory holds several copies.
    assert memory.peak_bytes < 8_000_000


def test_the_example_writes_what_is_read_to_parquet(settings: Settings, tmp_path: Path) -> None:
    traced = with_changed(settings, results__with_trace=True)
    made = accepted(5)
    publish(traced, made, message_with(minimal_payload(objective="ask")))
    example = REPOSITORY / "deploy" / "examples" / "decisions_to_parquet.py"
    variables = os.environ | as_environment(traced) | {"DECISIONS_A_FILE": "2"}
    # After a crash, the journal has a decision that will be delivered again, and half of another one.
    left = made[0].model_dump_json()
    (tmp_path / "journal.jsonl").write_text(f"{left}\n{left}\n{left[:100]}", "utf-8")
    with opened(sys.executable, example, tmp_path, env=variables) as process:
        # The first file has what the crash left. Two more are full, and the last decision waits for another one.
        journal = tmp_path / "journal.jsonl"
        wait_until(lambda: len(list(tmp_path.glob("*.parquet"))) == 3 and journal.read_bytes().count(b"\n") == 1)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    import polars  # Importing polars takes a second, which every process that collects this file would spend.

    table = polars.concat(map(polars.read_parquet, sorted(tmp_path.glob("*.parquet"))), how="vertical_relaxed")
    assert Counter(table["trace_id"]) == Counter([*ids_of(made), made[0].trace_id])
    assert {json.loads(text)["trace"]["task"]["objective"] for text in table["trace"] if "trace" in json.loads(text)} == {"ask"}
