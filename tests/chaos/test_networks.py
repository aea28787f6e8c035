"""When the network loses packets, connections or the broker for a while, workers report it, work waits, and nothing is lost."""

from typing import Final

import pytest
from kp_scorer.errors import ServiceUnavailable

from tests.support.arena import TRACES, Arena, endure, in_mid_load, submit, traces
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

THIRD: Final = TRACES // 3
SILENCE_S: Final = 4.0
"""Longer than all timeouts of the arena, the visibility timeout included; they are shorter than in production."""


def test_silent_connections(arena: Arena) -> None:
    load = traces()
    proxies = {arena.broker_proxy, arena.store_proxy}
    with in_mid_load(arena, load[:THIRD], arena.settings_behind_proxies()) as (client, fleet, submitted):
        for proxy in proxies:
            proxy.hold()
        submitted += submit(client, load[THIRD : 2 * THIRD])
        endure(SILENCE_S)
        # The data that was held arrives after all, as resent packets do.
        for proxy in proxies:
            proxy.deliver()
        decided = fleet.logged("trace_decided")
        wait_until(lambda: fleet.logged("trace_decided") > decided)
        for proxy in proxies:
            proxy.hold()
        endure(SILENCE_S)
        # The network comes back, but has forgotten all connections.
        for proxy in proxies:
            proxy.forget()
        submitted += submit(client, load[2 * THIRD :])
        arena.finish(fleet, submitted)
        assert fleet.ends == [], "workers must outlive a bad network"


def test_broker_gone_for_a_while(arena: Arena) -> None:
    load = traces()
    settings = arena.settings_behind_proxies()
    with in_mid_load(arena, load[:THIRD], settings, settings) as (client, fleet, submitted):
        # A short interruption comes first, then one that lasts.
        arena.broker_proxy.cut()
        decided = fleet.logged("trace_decided")
        # Submit more, as one worker may have decided all traces while the other started.
        submitted += submit(client, load[THIRD : 2 * THIRD])
        wait_until(lambda: fleet.logged("trace_decided") > decided + 20)
        arena.broker_proxy.refuse()
        with pytest.raises(ServiceUnavailable):
            client.submit(load[2 * THIRD])
        # If all submissions are decided by now, no trace waits, and only the consumer reports the outage.
        wait_until(lambda: fleet.logged("trace_waits") or fleet.logged("consumer: Cannot connect to"))
        arena.broker_proxy.accept()
        submitted += submit(client, load[2 * THIRD :])
        arena.finish(fleet, submitted)
        assert fleet.ends == [], "workers must outlive an absent broker"
