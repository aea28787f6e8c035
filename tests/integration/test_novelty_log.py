"""The novelty log on a real Redis, beside the one in memory: one behaviour, two places."""

from collections.abc import Callable

import numpy as np
import pytest
import redis
from kp_scorer.novelty import MemoryLog, NoveltyCache, NoveltyLog, Window
from kp_scorer.novelty.cache import Placed
from kp_scorer.novelty.log import Cursor
from kp_scorer.store import RedisLog, Store
from kp_scorer.store.keys import Keys

from tests.support.candidates import MINUTE_MS, candidate

WINDOW = Window(max_elements=4, ttl_ms=10 * MINUTE_MS, slack_elements=6, slack_ms=MINUTE_MS)
DIMENSIONS = 8

MakeLog = Callable[[Window], NoveltyLog]


@pytest.fixture(params=["redis", "memory"])
def make_log(request: pytest.FixtureRequest, redis_client: redis.Redis) -> MakeLog:
    """Both kinds of log."""
    if request.param == "memory":
        return MemoryLog
    return lambda window: RedisLog(redis_client, Keys("kp"), "space", window, record_ttl_ms=60_000)


def _cache(log: NoveltyLog, window: Window = WINDOW) -> NoveltyCache:
    return NoveltyCache(log, window, DIMENSIONS)


def _nearest(placed: Placed | None) -> tuple[str, float] | None:
    assert placed is not None
    return (placed.nearest.trace_id, round(placed.nearest.similarity, 5)) if placed.nearest else None


def test_the_first_trace_has_nothing_to_be_compared_with(make_log: MakeLog) -> None:
    (placed,) = _cache(make_log(WINDOW)).place([candidate("a", 1)])
    assert _nearest(placed) is None
    assert placed
    assert placed.place.number == 1


def test_a_batch_compares_its_traces_with_each_other_in_order(make_log: MakeLog) -> None:
    placed = _cache(make_log(WINDOW)).place([candidate("a", 1), candidate("b", 1), candidate("c", 2)])
    assert [_nearest(each) for each in placed][:2] == [None, ("a", 1.0)]
    assert placed[2]
    assert placed[2].place.number == 3


def test_two_caches_on_one_log_see_each_other(make_log: MakeLog) -> None:
    log = make_log(WINDOW)
    first, second = _cache(log), _cache(log)
    first.place([candidate("a", 1)])
    (placed,) = second.place([candidate("b", 1)])
    assert _nearest(placed) == ("a", 1.0)


def test_a_trace_admitted_again_gets_its_place_back_and_never_meets_itself(make_log: MakeLog) -> None:
    log = make_log(WINDOW)
    (before,) = _cache(log).place([candidate("a", 1)])
    _cache(log).place([candidate("b", 1)])
    (after,) = _cache(log).place([candidate("a", 1)])
    assert before
    assert after
    assert after.place == before.place
    assert _nearest(after) is None
    assert _cache(log).catch_up() == 2


def test_an_id_with_other_content_gets_no_place(make_log: MakeLog) -> None:
    log = make_log(WINDOW)
    placed = _cache(log).place([candidate("a", 1), candidate("a", 2), candidate("b", 2)])
    assert placed[1] is None
    assert _nearest(placed[2]) != ("a", 1.0)
    assert _cache(log).catch_up() == 2


def test_only_the_newest_elements_count(make_log: MakeLog) -> None:
    cache = _cache(make_log(WINDOW))
    cache.place([candidate("a", 1)])
    cache.place([candidate(f"between-{index}", 10 + index) for index in range(WINDOW.max_elements)])
    (placed,) = cache.place([candidate("again", 1)])
    assert placed
    assert placed.nearest
    assert placed.nearest.trace_id != "a"


def test_the_earliest_of_several_duplicates_is_named(make_log: MakeLog) -> None:
    cache = _cache(make_log(WINDOW))
    cache.place([candidate("first", 1), candidate("second", 1)])
    (placed,) = cache.place([candidate("third", 1)])
    assert placed
    assert placed.nearest
    assert placed.nearest.trace_id == "first"
    assert placed.nearest.is_duplicate


def test_a_redelivery_beyond_the_slack_is_placed_anew_and_still_never_meets_itself(make_log: MakeLog) -> None:
    wide = Window(max_elements=50, ttl_ms=10 * MINUTE_MS, slack_elements=3, slack_ms=MINUTE_MS)
    log = make_log(wide)
    cache = _cache(log, wide)
    (before,) = cache.place([candidate("late", 1)])
    cache.place([candidate(f"between-{index}", 10 + index) for index in range(5)])
    (after,) = cache.place([candidate("late", 1)])
    assert before
    assert after
    assert after.place.number == 7 > before.place.number
    assert after.nearest
    assert after.nearest.trace_id != "late"


def test_a_late_mirror_reads_in_chunks_and_misses_nothing(redis_client: redis.Redis) -> None:
    window = Window(max_elements=3_000, ttl_ms=10 * MINUTE_MS, slack_elements=10, slack_ms=MINUTE_MS)
    log = RedisLog(redis_client, Keys("kp"), "space", window, record_ttl_ms=60_000)
    writer = _cache(log, window)
    writer.place([candidate("needle", 1)])
    for start in range(0, 2_500, 500):
        writer.place([candidate(f"hay-{index}", 10 + index) for index in range(start, start + 500)])
    (placed,) = _cache(log, window).place([candidate("again", 1)])
    assert _nearest(placed) == ("needle", 1.0)


@pytest.mark.parametrize("space", ["space", "other"])
def test_spaces_never_meet(redis_client: redis.Redis, space: str) -> None:
    here = RedisLog(redis_client, Keys("kp"), "space", WINDOW, record_ttl_ms=60_000)
    there = RedisLog(redis_client, Keys("kp"), space, WINDOW, record_ttl_ms=60_000)
    _cache(here).place([candidate("a", 1)])
    (placed,) = _cache(there).place([candidate("b", 1)])
    assert (_nearest(placed) == ("a", 1.0)) == (space == "space")


def test_an_emptied_log_is_noticed_and_nothing_gone_is_compared_with(redis_client: redis.Redis) -> None:
    cache = _cache(RedisLog(redis_client, Keys("kp"), "space", WINDOW, record_ttl_ms=60_000))
    cache.place([candidate("a", 1)])
    redis_client.flushall()
    (placed,) = cache.place([candidate("b", 1)])
    assert _nearest(placed) is None
    assert placed
    assert placed.place.number == 1


def test_a_log_that_lost_its_newest_entries_is_noticed(redis_client: redis.Redis) -> None:
    keys = Keys("kp")
    log = RedisLog(redis_client, keys, "space", WINDOW, record_ttl_ms=60_000)
    cache = _cache(log)
    cache.place([candidate("a", 1)])
    saved = {key: redis_client.dump(key) for key in redis_client.scan_iter()}
    cache.place([candidate("lost", 2)])
    redis_client.flushall()
    for key, value in saved.items():
        assert value
        redis_client.restore(key, 60_000, value)
    _cache(log).place([candidate("other", 3)])
    placed = cache.place([candidate("like-the-lost", 2), candidate("like-a", 1)])
    assert placed[0]
    assert placed[0].nearest
    assert placed[0].nearest.similarity < 0.99
    assert _nearest(placed[1]) == ("a", 1.0)


def test_the_log_keeps_no_more_than_window_and_slack(redis_client: redis.Redis) -> None:
    keys = Keys("kp")
    window = Window(max_elements=100, ttl_ms=10 * MINUTE_MS, slack_elements=50, slack_ms=MINUTE_MS)
    cache = _cache(RedisLog(redis_client, keys, "space", window, record_ttl_ms=60_000), window)
    for start in range(0, 1_000, 50):
        cache.place([candidate(f"t{index}", index) for index in range(start, start + 50)])
    # Redis trims whole nodes of the stream, of at most 100 entries.
    assert window.kept_elements <= redis_client.xlen(keys.log("space")) <= window.kept_elements + 100
    assert all(redis_client.pttl(key) > 0 for key in redis_client.scan_iter())


def test_vectors_come_back_as_they_went_in(redis_client: redis.Redis) -> None:
    log = RedisLog(redis_client, Keys("kp"), "space", WINDOW, record_ttl_ms=60_000)
    sent = candidate("a", 1)
    _, tail = log.exchange([sent], None)
    assert np.array_equal(tail.entries[0].vector, sent.vector)


def test_an_erased_trace_is_dropped_by_mirrors_that_have_read_it(redis_client: redis.Redis) -> None:
    log = RedisLog(redis_client, Keys("kp"), "space", WINDOW, record_ttl_ms=60_000)
    cache = _cache(log)
    cache.place([candidate("erased", 1), candidate("other", 2)])
    assert log.erase("erased") == 1
    assert cache.catch_up() == 2, "read on, not from the start: the row stays as a blank"
    (placed,) = cache.place([candidate("again", 1)])
    assert placed
    assert placed.nearest
    assert placed.nearest.trace_id == "other"
    assert all(entry.trace_id != "erased" for entry in log.entries())


def test_a_trace_whose_record_has_expired_can_still_be_erased(redis_client: redis.Redis) -> None:
    keys = Keys("kp")
    log = RedisLog(redis_client, keys, "space", WINDOW, record_ttl_ms=60_000)
    _cache(log).place([candidate("erased", 1), candidate("other", 2)])
    redis_client.delete(keys.record("erased"))
    assert log.erase("erased") == 1
    assert log.erase("erased") == 0


def test_erasing_the_newest_entry_does_not_make_mirrors_start_over(redis_client: redis.Redis) -> None:
    log = RedisLog(redis_client, Keys("kp"), "space", WINDOW, record_ttl_ms=60_000)
    _, tail = log.exchange([candidate("a", 1), candidate("newest", 2)], None)
    cursor = Cursor(tail.epoch, tail.entries[-1].place, "newest", erasure="")
    log.erase("newest")
    _, after = log.exchange((), cursor)
    assert not after.restart
    assert not after.entries
    assert [erasure.place for erasure in after.erasures] == [cursor.place]


def test_erasing_takes_no_place_and_narrows_no_later_window(redis_client: redis.Redis) -> None:
    log = RedisLog(redis_client, Keys("kp"), "space", WINDOW, record_ttl_ms=60_000)
    cache = _cache(log)
    cache.place([candidate("first", 1), candidate("second", 2), candidate("third", 3)])
    assert (log.erase("second"), log.erase("third")) == (1, 1)
    for mirror in (cache, _cache(log)):
        (placed,) = mirror.place([candidate("again", 1)])
        assert placed
        assert (placed.place.number, _nearest(placed)) == (4, ("first", 1.0)), "both are in the window of four still"


def test_a_mirror_that_missed_erasures_starts_over(redis_client: redis.Redis) -> None:
    keys = Keys("kp")
    log = RedisLog(redis_client, keys, "space", WINDOW, record_ttl_ms=60_000)
    cache = _cache(log)
    cache.place([candidate("first", 1), candidate("second", 2), candidate("third", 3)])
    log.erase("second")
    cache.catch_up()
    log.erase("third")
    # As if so many were erased meanwhile that the stream has been trimmed beyond what this mirror has read.
    redis_client.xtrim(keys.erased("space"), maxlen=1, approximate=False)
    assert cache.catch_up() == 1


def test_what_was_erased_is_no_log(store: Store) -> None:
    log = store.novelty_log("space")
    log.exchange([candidate("a", 1), candidate("b", 2)], None)
    log.erase("a")
    assert [found.space for found in store.novelty_logs()] == ["space"]
