"""Pinned sets in Redis: commands add and remove them, and workers and offline scoring compare traces with them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import redis
from kp_scorer import SettingsError, score_traces
from kp_scorer.cli.commands import cache
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.novelty.pins import PinnedSet
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store import pinned_sets as pins_module
from kp_scorer.store.keys import Keys

from tests.support.builders import minimal_payload
from tests.support.changed_settings import with_changed
from tests.support.commands import command
from tests.support.fast_worker import WordHashEmbedder
from tests.support.processes import PATIENCE_S, at_work, wait_until
from tests.support.traces import jsonl, new_id, rows_in
from tests.support.word_embedder import WordEmbedder

REJECT: Final = {"tasks": {"similarity": 0.9, "beyond": "reject"}}


def pinned(*vectors: int, dimensions: int = 8) -> PinnedSet:
    """Return a set of unit vectors along these axes."""
    return PinnedSet("traces", [f"kp:trace:{axis}" for axis in vectors], np.eye(dimensions, dtype=np.float32)[list(vectors)])


def same(first: PinnedSet | None, second: PinnedSet) -> bool:
    return first is not None and (first.kind, list(first.ids), first.version) == (second.kind, list(second.ids), second.version)


def keep(store: Store, name: str, pinned_set: PinnedSet, space: str = "space") -> None:
    store.pinned_sets(space).replace(name, pinned_set, check_room=lambda: None)


def test_a_set_is_replaced_as_a_whole_and_belongs_to_its_space(
    store: Store, redis_client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins_module, "_CHUNK", 2)
    sets = store.pinned_sets("space")
    assert (sets.versions(["tasks"]), sets.read("tasks")) == ([None], None)
    for each in (pinned(1, 2, 3, 4, 5), pinned(6)):
        keep(store, "tasks", each)
        assert same(sets.read("tasks"), each)
        assert sets.versions(["other", "tasks"]) == [None, each.version]
    assert store.pinned_sets("other").versions(["tasks"]) == [None]
    assert redis_client.pttl(keys.pinned_set("space", "tasks")) == -1, "it never expires"
    (described,) = store.all_pinned_sets()
    assert described.pop("bytes") > 32
    assert list(described.values()) == ["space", "tasks", "traces", pinned(6).version, 1]
    sets.remove("tasks")
    assert store.all_pinned_sets() == []


def test_an_unfinished_replacement_expires_and_leaves_the_set_unchanged(
    store: Store, redis_client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, "tasks", pinned(1))
    monkeypatch.setattr(pins_module, "_CHUNK", 1)
    outages = iter([None])
    with pytest.raises(StopIteration):
        store.pinned_sets("space").replace("tasks", pinned(2, 3), check_room=lambda: next(outages))
    assert same(store.pinned_sets("space").read("tasks"), pinned(1))
    (key,) = redis_client.scan_iter(keys.pinning("*"))
    assert 0 < redis_client.pttl(key) <= 60_000


@pytest.mark.parametrize("field", ["kind", "ids:0", "vectors:0", "entries"])
def test_a_set_that_somebody_has_changed_counts_as_missing(
    store: Store, redis_client: redis.Redis, keys: Keys, field: str
) -> None:
    keep(store, "tasks", pinned(1, 2))
    redis_client.hset(keys.pinned_set("space", "tasks"), field, "0")
    assert store.pinned_sets("space").read("tasks") is None


@pytest.fixture
def words(settings: Settings) -> Settings:
    return with_changed(settings, embedding__embedder="words")


def test_files_of_texts_and_of_traces_are_pinned_listed_and_removed(words: Settings, tmp_path: Path) -> None:
    file = tmp_path / "tasks.txt"
    file.write_text("count the open invoices\n\nbook a flight to Rome\n")
    of_texts = command(words, "cache", "pin", "tasks", str(file))
    assert of_texts.exit_code == 0, of_texts.stderr
    of_traces = command(words, "cache", "pin", "runs", "-", stdin=json.dumps(minimal_payload()) + "\n")
    assert of_traces.exit_code == 0, of_traces.stderr
    (texts,), (traces,) = rows_in(of_texts.stdout), rows_in(of_traces.stdout)
    assert (texts["kind"], texts["entries"], traces["kind"], traces["entries"]) == ("texts", 2, "traces", 1)
    listed = rows_in(command(words, "cache", "info").stdout)
    assert [(each["name"], each["version"]) for each in listed] == [("runs", traces["version"]), ("tasks", texts["version"])]
    assert command(words, "cache", "unpin", "tasks").exit_code == 0
    assert [each["name"] for each in rows_in(command(words, "cache", "info").stdout)] == ["runs"]
    assert command(words, "cache", "unpin", "tasks").exit_code == 2


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("a b", "text", "NAME"),
        ("tasks", "\n", "expected 1 to 100000 traces or texts, got 0"),
        ("tasks", "text\n" * 100_001, "expected 1 to 100000 traces or texts, got 100001"),
        ("tasks", "text\nt\0e\0x\0t\0", "line 2: expected text in UTF-8"),
        ("tasks", "x" * 100_001, "line 1: expected at most 100000 characters"),
        ("tasks", json.dumps(minimal_payload()) + '\n{"no": "trace"}\n', "line 2: "),
    ],
)
def test_texts_and_traces_that_cannot_be_pinned_are_refused(
    words: Settings, store: Store, name: str, lines: str, message: str
) -> None:
    refused = command(words, "cache", "pin", name, "-", stdin=lines)
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert store.all_pinned_sets() == []


class NanEmbedder(WordEmbedder):
    """An embedder that returns NaN for a text with the word nan, and for every text that is embedded together with it."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = super().embed(texts)
        return vectors * np.nan if any("nan" in text.split() for text in texts) else vectors


@pytest.fixture
def with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "select_embedder", lambda *_: NanEmbedder())


@pytest.mark.usefixtures("with_nan")
@pytest.mark.parametrize("as_traces", [False, True])
def test_a_text_without_a_vector_is_refused_and_the_others_are_pinned(settings: Settings, *, as_traces: bool) -> None:
    texts = ["count the open invoices", "nan", "book a flight"]
    traces = [minimal_payload(trace_id=f"kp:trace:{number}", objective=text) for number, text in enumerate(texts)]
    pinned = command(settings, "cache", "pin", "tasks", "-", stdin=jsonl(*traces) if as_traces else "\n".join(texts))
    assert pinned.exit_code == 1, pinned.output
    refused, described = rows_in(pinned.stdout)
    assert (refused["line"], refused["state"], described["entries"]) == (2, "invalid", 2)
    assert "line 2: $: expected a text that the embedder has a vector for" in pinned.stderr
    nothing = command(settings, "cache", "pin", "nothing", "-", stdin="nan")
    assert (nothing.exit_code, "nothing is pinned" in nothing.stderr) == (2, True)


@pytest.mark.usefixtures("with_nan")
def test_a_trace_without_a_vector_is_refused_and_the_others_warm_the_log(settings: Settings, store: Store) -> None:
    traces = [minimal_payload(trace_id=f"kp:trace:{text}", objective=text) for text in ("one", "nan", "two", "three")]
    warmed = command(settings, "cache", "warm", "-", stdin=jsonl(*traces, traces[0] | {"steps": traces[0]["steps"] * 2}))
    refused, conflict, result = rows_in(warmed.stdout)
    assert (warmed.exit_code, refused["line"], conflict["line"], result["warmed"]) == (1, 2, 5, 3), warmed.output
    entries = list(store.novelty_log(NanEmbedder.space).entries())
    assert [entry.trace_id for entry in entries] == [f"kp:trace:{text}" for text in ("one", "two", "three")]


def test_offline_scoring_reads_the_sets_in_redis(words: Settings) -> None:
    changed = with_changed(words, novelty__pinned=REJECT, scoring__threshold=0.0)
    trace = minimal_payload(objective="count the open invoices")
    with pytest.raises(SettingsError, match=r"novelty\.pinned: tasks: not pinned in this space"):
        next(score_traces([trace], changed))
    command(words, "cache", "pin", "tasks", "-", stdin="count the open invoices")
    (decision,) = score_traces([trace], changed)
    assert (decision.outcome, decision.pinned[0].nearest) == ("rejected", "1")
    offline = with_changed(changed, broker__url="", redis__url="")
    with pytest.raises(SettingsError, match=r"novelty\.pinned: the sets are in Redis"):
        next(score_traces([trace], offline))
    without = with_changed(changed, embedding__embedder="none")
    with pytest.raises(SettingsError, match=r"novelty\.pinned: no embedder"):
        next(score_traces([trace], without))


def word_hash_set(*texts: str) -> PinnedSet:
    embedder = WordHashEmbedder(Settings().embedding, "trace")
    return PinnedSet("texts", [str(number) for number, _ in enumerate(texts, 1)], embedder.embed(texts))


def decide(client: Client, objective: str) -> Decision:
    return client.wait(client.submit(minimal_payload(trace_id=new_id(), objective=objective)), timeout_s=PATIENCE_S)


def test_a_worker_follows_its_sets_and_decides_nothing_without_one(
    settings: Settings, store: Store, redis_client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    changed = with_changed(settings, novelty__pinned=REJECT, scoring__threshold=0.0)
    with at_work(changed, tmp_path, ready=False) as (started, client):
        wait_until(lambda: started.events("service_unavailable"))
        assert "novelty.pinned: tasks: not pinned in this space" in started.text()
        keep(store, "tasks", word_hash_set("wash the car"), "word-hash-1")
        first = decide(client, "count the open invoices")
        assert (first.outcome, first.pinned[0].name, first.pinned[0].nearest) == ("accepted", "tasks", "1")
        keep(store, "tasks", of_tasks := word_hash_set("wash the car", "count the open invoices"), "word-hash-1")
        second = decide(client, "count the open invoices")
        assert (second.outcome, second.pinned[0].nearest, second.pinned[0].version) == ("rejected", "2", of_tasks.version)
        store.pinned_sets("word-hash-1").remove("tasks")
        waiting = client.submit(minimal_payload(trace_id=new_id(), objective="count the open invoices"))
        wait_until(lambda: started.events("trace_waits"))
        wait_until(lambda: "novelty.pinned: tasks: not pinned in this space" in str(store.worker_reports()))
        keep(store, "tasks", of_tasks, "word-hash-1")
        assert client.wait(waiting, timeout_s=PATIENCE_S).outcome == "rejected"
    audited = command(settings, "audit")
    assert audited.exit_code == 0, audited.stderr
    assert "pinned sets: 0 agree, 0 differ, 3 cannot be checked" in audited.stderr
    # Simulate a redelivery after the slack, which appends the first trace a second time.
    (novelty_log,) = store.novelty_logs()
    entry = next(novelty_log.entries())
    redis_client.xadd(keys.of_log(novelty_log.space).log, {"i": entry.trace_id, "d": entry.digest, "v": entry.vector.tobytes()})
    again = command(settings, "audit")
    assert "pinned sets: 0 agree, 0 differ, 3 cannot be checked" in again.stderr
