"""The same transport to whatever sentinels say is the primary."""

from collections.abc import Sequence
from typing import Any

from kombu.transport import redis as kombu_redis

from kp_scorer.broker.redis_transport.channel import Channel, Transport
from kp_scorer.store.connection import leave_replicas
from kp_scorer.store.sentinel import primary_pool


class SentinelChannel(Channel):
    """Takes the sentinels from ``transport_options``.

    Kombu's own takes them from the URL, as alternatives of each other: a connection that tries the second of them forgets which
    transport it was told to use, and takes kombu's instead of ours.
    """

    connection_class = kombu_redis.sentinel.SentinelManagedConnection
    connection_class_ssl = kombu_redis.SentinelManagedSSLConnection

    keyprefix_fanout: str
    sentinels: Sequence[tuple[str, int]]
    master_name: str
    sentinel_kwargs: dict[str, Any]

    from_transport_options = (*Channel.from_transport_options, "sentinels", "master_name", "sentinel_kwargs")

    def _get_pool(self, asynchronous: bool = False) -> Any:
        options = self._connparams(asynchronous=asynchronous)
        self.keyprefix_fanout = self.keyprefix_fanout.format(db=options["db"])
        # They are those of the first sentinel.
        del options["host"], options["port"]
        pool = primary_pool(self.sentinels, self.master_name, self.sentinel_kwargs, **options)
        leave_replicas(pool)
        return pool

    def _disconnect_pools(self) -> None:
        pools = [pool for pool in (self._pool, self._async_pool) if pool is not None]
        super()._disconnect_pools()
        for pool in pools:
            pool.sentinel_manager.close()


class SentinelTransport(Transport):
    """The transport with that channel; for the setting ``broker_transport``."""

    Channel = SentinelChannel
