"""Workers on one log have one window: its first writer's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from kp_scorer.errors import SettingsError
from kp_scorer.novelty import NoveltyCache, Window
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import RedisLog, Store
from kp_scorer.store.keys import Keys

from tests.support.candidates import MINUTE_MS, candidate
from tests.support.processes import FAST_WORKER, launch_worker

WINDOW = Window(max_elements=4, ttl_ms=10 * MINUTE_MS, slack_elements=6, slack_ms=MINUTE_MS)
CHANGES: list[tuple[dict[str, int], str]] = [
    ({"max_elements": 5}, r"^novelty\.max_elements is 4 there and 5 here: "),
    ({"ttl_ms": 90_500}, r"^novelty\.ttl_s is 600 there and 90\.5 here: "),
    ({"slack_elements": 7}, r"^novelty\.slack_elements is 6 there and 7 here: "),
    ({"slack_ms": 1_000, "max_elements": 5}, r"^novelty\.max_elements is 4 .* here, novelty\.slack_s is 60 there and 1 here: "),
]


def log_with(redis_client: redis.Redis, window: Window) -> RedisLog:
    return RedisLog(redis_client, Keys("kp"), "space", window, record_ttl_ms=60_000)


@pytest.mark.parametrize(("changes", "told"), CHANGES, ids=[",".join(changes) for changes, _ in CHANGES])
def test_another_window_is_refused_and_changes_nothing(redis_client: redis.Redis, changes: Any, told: str) -> None:
    first = log_with(redis_client, WINDOW)
    first.exchange([candidate("a", 1)], None)
    other = log_with(redis_client, replace(WINDOW, **changes))
    for candidates in ([], [candidate("b", 2)]):
        with pytest.raises(SettingsError, match=told):
            other.exchange(candidates, None)
    assert first.info().window == WINDOW
    assert [entry.trace_id for entry in first.entries()] == ["a"]
    assert first.exchange([candidate("c", 3)], None)[0][0]


@pytest.mark.parametrize("emptied", ["cleared", "expired", "erased", "never written"])
def test_an_empty_log_takes_any_window(redis_client: redis.Redis, emptied: str) -> None:
    first, wider = log_with(redis_client, WINDOW), replace(WINDOW, max_elements=5)
    if emptied != "never written":
        first.exchange([candidate("a", 1)], None)
    match emptied:
        case "cleared":
            first.clear()
        case "expired":
            redis_client.delete(Keys("kp").log("space"))
        case "erased":
            first.erase("a")
    second = log_with(redis_client, wider)
    assert NoveltyCache(second, wider, 8).catch_up() == 0
    second.exchange([candidate("b", 2)], None)
    assert second.info().window == wider
    with pytest.raises(SettingsError, match="is 5 there and 4 here"):
        first.exchange([], None)


def test_a_log_from_before_windows_were_noted_is_used(redis_client: redis.Redis) -> None:
    log = log_with(redis_client, WINDOW)
    log.exchange([candidate("a", 1)], None)
    redis_client.hdel(Keys("kp").head("space"), "window")
    assert log.info().window is None
    log.exchange([candidate("b", 2)], None)
    assert log.info().window == WINDOW


def test_a_worker_with_another_window_does_not_start(settings: Settings, tmp_path: Path) -> None:
    with Store.open(settings) as store:
        store.novelty_log("word-hash-1").exchange([candidate("a", 1, dimensions=128)], None)
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    worker = launch_worker(load_settings({**urls, "novelty.max_elements": 7}), tmp_path / "worker.log", FAST_WORKER)
    assert worker.process.wait(60) == SettingsError.exit_code
    (line,) = worker.events("worker_cannot_start")
    assert line["detail"].startswith("novelty.max_elements is 1000 there and 7 here: the log word-hash-1 ")
