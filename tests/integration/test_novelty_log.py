"""The novelty log, on a real Redis and in memory. Workers on one log share the window that its first writer set."""

from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.novelty import MemoryLog, NoveltyCache, NoveltyLog, Placement, Window
from kp_scorer.novelty.log import Cursor
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.novelty_log import RedisLog

from tests.support.builders import MINUTE_MS, candidate
from tests.support.changed_settings import with_changed
from tests.support.processes import FAST_WORKER, PATIENCE_S, at_work, launch_worker, start_worker
from tests.support.traces import fresh_samples

WINDOW = Window(max_elements=4, ttl_ms=10 * MINUTE_MS, slack_elements=6, slack_ms=MINUTE_MS)
DIMENSIONS = 8
KEYS = Keys("kp")

MakeLog = Callable[[Window], NoveltyLog]


def log_in(redis_client: redis.Redis, window: Window = WINDOW) -> RedisLog:
    return RedisLog(redis_client, KEYS, "space", window, record_ttl_ms=60_000)


@pytest.fixture(params=["redis", "memory"])
def make_log(request: pytest.FixtureRequest, redis_client: redis.Redis) -> MakeLog:
    return MemoryLog if request.param == "memory" else lambda window: log_in(redis_client, window)


def cache_of(log: NoveltyLog, window: Window = WINDOW) -> NoveltyCache:
    return NoveltyCache(log, window, DIMENSIONS)


def place(cache: NoveltyCache, trace_id: str, seed: int) -> Placement:
    """Place a trace whose vector follows from the seed."""
    (placement,) = cache.place([candidate(trace_id, seed)])
    assert placement
    return placement


def nearest(placement: Placement | None) -> tuple[str, float] | None:
    assert placement is not None
    return (placement.nearest.trace_id, round(placement.nearest.similarity, 5)) if placement.nearest else None


def test_a_trace_placed_again_gets_its_place_back_and_never_meets_itself(make_log: MakeLog) -> None:
    log = make_log(WINDOW)
    before = place(cache_of(log), "a", 1)
    place(cache_of(log), "b", 1)
    after = place(cache_of(log), "a", 1)
    assert (after.place, after.nearest) == (before.place, None)
    assert cache_of(log).catch_up() == 2


def test_the_earliest_of_several_duplicates_is_named(make_log: MakeLog) -> None:
    cache = cache_of(make_log(WINDOW))
    cache.place([candidate("first", 1), candidate("second", 1)])
    placement = place(cache, "third", 1)
    assert placement.nearest
    assert (placement.nearest.trace_id, placement.nearest.is_duplicate) == ("first", True)


def test_a_redelivery_beyond_the_slack_is_placed_anew_and_still_never_meets_itself(make_log: MakeLog) -> None:
    wide = Window(max_elements=50, ttl_ms=10 * MINUTE_MS, slack_elements=3, slack_ms=MINUTE_MS)
    cache = cache_of(make_log(wide), wide)
    before = place(cache, "late", 1)
    cache.place([candidate(f"between-{index}", 10 + index) for index in range(5)])
    after = place(cache, "late", 1)
    assert after.place.number == 7 > before.place.number
    assert (nearest(after) or ("late",))[0] != "late"


def test_only_entries_that_do_not_count_have_a_mark_in_the_log(redis_client: redis.Redis) -> None:
    log, sent = log_in(redis_client), [candidate("a", 1), candidate("b", 2)._replace(is_comparable=False)]
    log.append(sent, None)
    fields = [b"i", b"a", b"d", sent[0].digest, b"v", sent[0].vector.tobytes()]
    stored: Any = redis_client.xrange(KEYS.of_log("space").log)
    assert list(chain(*stored[0][1].items())) == fields
    assert list(stored[1][1]) == [b"i", b"d", b"v", b"c"]
    assert redis_client.hget(KEYS.of_log("space").head, "window") == b"4 600000 6 60000"
    assert [entry.is_comparable for entry in log.entries()] == [True, False]


def test_the_log_keeps_no_more_than_window_and_slack(redis_client: redis.Redis) -> None:
    window = Window(max_elements=100, ttl_ms=10 * MINUTE_MS, slack_elements=50, slack_ms=MINUTE_MS)
    cache = cache_of(log_in(redis_client, window), window)
    for start in range(0, 1_000, 50):
        cache.place([candidate(f"t{index}", index) for index in range(start, start + 50)])
    # Redis trims only whole nodes of the stream, which have up to 100 entries.
    assert window.kept_elements <= redis_client.xlen(KEYS.of_log("space").log) <= window.kept_elements + 100
    assert all(redis_client.pttl(key) > 0 for key in redis_client.scan_iter())


def test_erasing_the_newest_entry_does_not_make_mirrors_start_over(redis_client: redis.Redis) -> None:
    log = log_in(redis_client)
    _, tail = log.append([candidate("a", 1), candidate("newest", 2)], None)
    cursor = Cursor(tail.epoch, tail.entries[-1].place, "newest", erasure="")
    log.erase("newest")
    _, after = log.append((), cursor)
    assert (after.restart, after.entries) == (False, [])
    assert [erasure.place for erasure in after.erasures] == [cursor.place]


def test_a_mirror_that_missed_erasures_starts_over(redis_client: redis.Redis) -> None:
    log = log_in(redis_client)
    cache = cache_of(log)
    cache.place([candidate("first", 1), candidate("second", 2), candidate("third", 3)])
    log.erase("second")
    cache.catch_up()
    log.erase("third")
    # Simulate enough erasures for the stream to be trimmed beyond the position of this mirror.
    redis_client.xtrim(KEYS.of_log("space").erasures, maxlen=1, approximate=False)
    assert cache.catch_up() == 1


def test_erasures_are_not_listed_as_a_log(store: Store) -> None:
    log = store.novelty_log("space")
    log.append([candidate("a", 1), candidate("b", 2)], None)
    log.erase("a")
    assert [stored.space for stored in store.novelty_logs()] == ["space"]


CHANGES: list[tuple[dict[str, float], str]] = [
    ({"max_elements": 5}, r"^novelty\.max_elements is 4 there and 5 here: "),
    ({"ttl_ms": 90_500}, r"^novelty\.ttl_s is 600 there and 90\.5 here: "),
    ({"slack_elements": 7}, r"^novelty\.slack_elements is 6 there and 7 here: "),
    (
        {"ttl_ms": 90_500, "max_elements": 5},
        r"^novelty\.max_elements is 4 .* here, novelty\.ttl_s is 600 there and 90\.5 here: ",
    ),
    ({"succeeded_confidence": 0.5}, r"^novelty\.against is all there and succeeded here: "),
    ({"slack_ms": 1_000}, r"^its slack is 60000 ms there and 1000 ms here: "),
]


def test_workers_agree_on_what_success_is(redis_client: redis.Redis) -> None:
    window = WINDOW._replace(succeeded_confidence=0.5)
    first = log_in(redis_client, window)
    first.append([candidate("a", 1)], None)
    assert (first.info().window, Window.parse(str(window))) == (window, window)
    with pytest.raises(SettingsError, match=r"^novelty\.against is succeeded there and all here: "):
        log_in(redis_client).append([], None)


@pytest.mark.parametrize(("changes", "message"), CHANGES, ids=[",".join(changes) for changes, _ in CHANGES])
def test_another_window_is_refused_and_changes_nothing(redis_client: redis.Redis, changes: Any, message: str) -> None:
    first = log_in(redis_client, WINDOW)
    first.append([candidate("a", 1)], None)
    changed = log_in(redis_client, WINDOW._replace(**changes))
    for candidates in ([], [candidate("b", 2)]):
        with pytest.raises(SettingsError, match=message):
            changed.append(candidates, None)
    assert first.info().window == WINDOW
    assert [entry.trace_id for entry in first.entries()] == ["a"]
    assert first.append([candidate("c", 3)], None)[0][0]


@pytest.mark.parametrize("emptied", ["cleared", "expired", "erased", "never written"])
def test_an_empty_log_accepts_any_window(redis_client: redis.Redis, emptied: str) -> None:
    first, wider = log_in(redis_client, WINDOW), WINDOW._replace(max_elements=5)
    if emptied != "never written":
        first.append([candidate("a", 1)], None)
    match emptied:
        case "cleared":
            first.clear()
        case "expired":
            redis_client.delete(Keys("kp").of_log("space").log)
        case "erased":
            first.erase("a")
    second = log_in(redis_client, wider)
    assert NoveltyCache(second, wider, 8).catch_up() == 0
    second.append([candidate("b", 2)], None)
    assert second.info().window == wider
    with pytest.raises(SettingsError, match="is 5 there and 4 here"):
        first.append([], None)


def test_a_worker_with_another_window_does_not_start(settings: Settings, store: Store, tmp_path: Path) -> None:
    store.novelty_log("word-hash-1").append([candidate("a", 1, dimensions=128)], None)
    worker = launch_worker(with_changed(settings, novelty__max_elements=7), tmp_path / "worker.log", FAST_WORKER)
    assert worker.process.wait(PATIENCE_S) == SettingsError.exit_code
    (line,) = worker.events("worker_cannot_start")
    assert line["detail"].startswith("novelty.max_elements is 1000 there and 7 here: the log word-hash-1 ")


def test_a_worker_whose_window_turns_out_to_be_another_requeues_and_ends(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    differing = with_changed(settings, novelty__max_elements=7)
    with start_worker(differing, tmp_path / "differing.log", command=FAST_WORKER) as worker, Client(settings) as client:
        store.novelty_log("word-hash-1").append([candidate("a", 1, dimensions=128)], None)
        ids = [client.submit(trace) for trace in fresh_samples(5)]
        assert worker.process.wait(PATIENCE_S) == SettingsError.exit_code
        (line,) = worker.events("worker_cannot_go_on")
        assert line["detail"].startswith("novelty.max_elements is 1000 there and 7 here: the log word-hash-1 ")
        with at_work(settings, tmp_path):
            assert {status.state for status in client.as_completed(ids, timeout_s=PATIENCE_S)} == {"decided"}


@pytest.mark.parametrize("command", ["hmget", "hset", "pexpire", "time", "xadd", "xdel", "xrange", "xtrim"])
def test_traces_are_placed_once_redis_no_longer_refuses_a_command(alone: tuple[Settings, redis.Redis], command: str) -> None:
    settings, client = alone
    client.acl_setuser("worker", enabled=True, nopass=True, keys=["*"], commands=["+@all"])
    with redis.Redis.from_url(settings.redis.url, username="worker", password="any") as worker:
        cache = cache_of(log_in(worker))
        place(cache, "before", 1)
        client.acl_setuser("worker", commands=[f"-{command}"])
        for _ in range(2):
            with suppress(ServiceUnavailable):
                cache.place([candidate("a", 2), candidate("b", 3)])
        client.acl_setuser("worker", commands=[f"+{command}"])
        cache.place([candidate("a", 2), candidate("b", 3)])
        assert nearest(place(cache, "after", 3)) == ("b", 1.0)
    numbers = [entry.place.number for entry in log_in(client).entries()]
    assert numbers == [1, 2, 3, 4]
