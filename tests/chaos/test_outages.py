"""When Redis dies, comes back without its last second, or is full, work waits, and nothing is lost unnoticed."""

from typing import Final

import pytest
from kp_scorer.errors import ServiceUnavailable

from tests.support.arena import TRACES, Arena, decided_of, in_mid_load, submit, traces, wait_until_ended
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

HALF: Final = TRACES // 2


def test_redis_killed_and_started_again_in_mid_load(arena: Arena) -> None:
    load = traces()
    with in_mid_load(arena, load[:HALF], arena.settings()) as (client, fleet, submitted):
        arena.redis.kill()
        with pytest.raises(ServiceUnavailable):
            client.submit(load[HALF])
        wait_until(lambda: fleet.logged("trace_waits"))
        arena.redis.start()
        submitted += submit(client, load[HALF:])
        arena.finish(fleet, submitted)
        assert fleet.ends == [], "workers must outlive a restart"


def test_redis_comes_back_without_its_last_second(arena: Arena) -> None:
    load = traces()
    with in_mid_load(arena, load[:HALF], arena.settings_behind_proxies()) as (client, fleet, submitted):
        wait_until(lambda: fleet.logged("trace_decided") > 20)
        length = arena.redis.file_bytes()
        decided = fleet.logged("trace_decided")
        submitted += submit(client, load[HALF : HALF + HALF // 2])
        wait_until(lambda: fleet.logged("trace_decided") > decided + 20)
        arena.redis.kill()
        arena.redis.cut_file(length)
        # Keep the workers away, so that the test looks at the restarted Redis before they do.
        arena.store_proxy.refuse()
        arena.redis.start()
        # Submissions that were acknowledged in the lost second are unknown now, as a look-up shows.
        is_recorded = [status is not None for status in client.look_up(submitted)]
        assert not all(is_recorded), "the cut has cost nothing, so it tests nothing"
        undecided = set(submitted) - decided_of(client, submitted)
        arena.store_proxy.accept()
        submit(client, [trace for trace, recorded in zip(load, is_recorded, strict=False) if not recorded])
        submitted += submit(client, load[HALF + HALF // 2 :])
        # A decision of the lost second may have been published; its trace is then decided and published again.
        arena.finish(fleet, submitted, decided_twice=undecided, store_lost_writes=True)


def test_redis_full_in_mid_load(arena: Arena) -> None:
    load = traces()
    with in_mid_load(arena, load[:HALF], arena.settings()) as (client, fleet, submitted):
        arena.redis.limit_memory(1)
        with pytest.raises(ServiceUnavailable):
            client.submit(load[HALF])
        assert len(decided_of(client, submitted)) < HALF, "full too late to test anything"
        # Work that frees memory goes on, both in running workers and in those that start now.
        fleet.kill(0)
        wait_until_ended(arena.settings(), submitted)
        wait_until(arena.is_idle)
        arena.redis.limit_memory(0)
        submitted += submit(client, load[HALF:])
        arena.finish(fleet, submitted)
        assert fleet.ends == [-9], "workers must outlive a full store"
