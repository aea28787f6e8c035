"""Redis that dies, comes back, comes back without its last second, or is full, and a network that loses packets, connections or
the broker for a while: it shows, work waits, and nothing is lost."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings

from tests.support.arena import TRACES, Arena, decided_of, endure, slowly, submit, supervised, traces, wait_until_ended
from tests.support.fleet import Fleet
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

HALF: Final = TRACES // 2
THIRD: Final = TRACES // 3
SILENCE_S: Final = 4.0
"""Longer than every timeout and the visibility timeout of the arena; all of them are shorter here than in production."""


@contextmanager
def in_mid_load(
    arena: Arena, load: Sequence[Mapping[str, Any]], workers: Settings, producer: Settings | None = None
) -> Iterator[tuple[Client, Fleet, list[str]]]:
    """A client that has submitted traces, two workers that have begun to decide them, and the ids of the traces."""
    with Client(producer or arena.settings()) as client, supervised(workers, arena.directory, 2, slowly) as fleet:
        submitted = submit(client, load)
        fleet.wait_until_ready()
        wait_until(lambda: fleet.logged("trace_decided"))
        yield client, fleet, submitted


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
        # The workers see it only after the test has.
        arena.store_proxy.refuse()
        arena.redis.start()
        # What was acknowledged in the lost second is unknown now, which a submitter who looks can see.
        is_recorded = [status is not None for status in client.look_up(submitted)]
        assert not all(is_recorded), "the cut has cost nothing, so it tests nothing"
        undecided = set(submitted) - decided_of(client, submitted)
        arena.store_proxy.accept()
        submit(client, [trace for trace, recorded in zip(load, is_recorded, strict=False) if not recorded])
        submitted += submit(client, load[HALF + HALF // 2 :])
        # A decision of the lost second may have left for its queue, and is then made, and published, again.
        arena.finish(fleet, submitted, decided_twice=undecided, store_lost_writes=True)


def test_redis_full_in_mid_load(arena: Arena) -> None:
    load = traces()
    with in_mid_load(arena, load[:HALF], arena.settings()) as (client, fleet, submitted):
        arena.redis.limit_memory(1)
        with pytest.raises(ServiceUnavailable):
            client.submit(load[HALF])
        assert len(decided_of(client, submitted)) < HALF, "full too late to test anything"
        # What frees memory goes on: by those who were there, and by those who start only now.
        fleet.kill(0)
        wait_until_ended(arena.settings(), submitted)
        wait_until(arena.is_idle)
        arena.redis.limit_memory(0)
        submitted += submit(client, load[HALF:])
        arena.finish(fleet, submitted)
        assert fleet.ends == [-9], "workers must outlive a full store"


def test_silent_connections(arena: Arena) -> None:
    load = traces()
    proxies = {arena.broker_proxy, arena.store_proxy}
    with in_mid_load(arena, load[:THIRD], arena.settings_behind_proxies()) as (client, fleet, submitted):
        for proxy in proxies:
            proxy.hold()
        submitted += submit(client, load[THIRD : 2 * THIRD])
        endure(SILENCE_S)
        # What was held arrives after all, as packets do that are sent again.
        for proxy in proxies:
            proxy.deliver()
        decided = fleet.logged("trace_decided")
        wait_until(lambda: fleet.logged("trace_decided") > decided)
        for proxy in proxies:
            proxy.hold()
        endure(SILENCE_S)
        # The network is back, and has forgotten the connections there were.
        for proxy in proxies:
            proxy.forget()
        submitted += submit(client, load[2 * THIRD :])
        arena.finish(fleet, submitted)
        assert fleet.ends == [], "workers must outlive a bad network"


def test_broker_gone_for_a_while(arena: Arena) -> None:
    load = traces()
    settings = arena.settings_behind_proxies()
    with in_mid_load(arena, load[:THIRD], settings, settings) as (client, fleet, submitted):
        # First a short interruption, then one that lasts.
        arena.broker_proxy.cut()
        decided = fleet.logged("trace_decided")
        # One worker may have decided all there was while another started.
        submitted += submit(client, load[THIRD : 2 * THIRD])
        wait_until(lambda: fleet.logged("trace_decided") > decided + 20)
        arena.broker_proxy.refuse()
        with pytest.raises(ServiceUnavailable):
            client.submit(load[2 * THIRD])
        # Of what has been submitted all may be decided by now, so perhaps nothing waits.
        wait_until(lambda: fleet.logged("trace_waits") or fleet.logged("consumer: Cannot connect to"))
        arena.broker_proxy.accept()
        submitted += submit(client, load[2 * THIRD :])
        arena.finish(fleet, submitted)
        assert fleet.ends == [], "workers must outlive an absent broker"
