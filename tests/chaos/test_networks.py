"""A network loses packets, connections or the broker for a while: it shows, work waits, and nothing is lost."""

from typing import Final

import pytest
from kp_scorer.errors import ServiceUnavailable

from tests.support.arena import TRACES, Arena, endure, in_mid_load, submit, traces
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

THIRD: Final = TRACES // 3
SILENCE_S: Final = 4.0
"""Longer than every timeout and the visibility timeout of the arena; all of them are shorter here than in production."""


def test_silent_connections(arena: Arena) -> None:
    load = traces()
    proxies = {arena.broker_proxy, arena.store_proxy}
    with in_mid_load(arena, load[:THIRD], arena.settings_behind_proxies()) as (client, fleet, submitted):
        for proxy in proxies:
            proxy.hold()
        submitted += submit(client, load[THIRD : 2 * THIRD])
        endure(SILENCE_S)
        # The held data arrives after all, as resent packets do.
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
        # One worker may have decided all traces while another started.
        submitted += submit(client, load[THIRD : 2 * THIRD])
        wait_until(lambda: fleet.logged("trace_decided") > decided + 20)
        arena.broker_proxy.refuse()
        with pytest.raises(ServiceUnavailable):
            client.submit(load[2 * THIRD])
        # All submissions may be decided by now, so perhaps nothing waits.
        wait_until(lambda: fleet.logged("trace_waits") or fleet.logged("consumer: Cannot connect to"))
        arena.broker_proxy.accept()
        submitted += submit(client, load[2 * THIRD :])
        arena.finish(fleet, submitted)
        assert fleet.ends == [], "workers must outlive an absent broker"
