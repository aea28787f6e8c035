"""Everything of ours in one Redis, opened in one place."""

import time
from typing import Self

import redis

from kp_scorer.settings import Settings
from kp_scorer.store.connection import connect, unavailable_if_down
from kp_scorer.store.dead_letters import DeadLetters, OnBurial, nobody_told
from kp_scorer.store.decision_stream import DecisionStream
from kp_scorer.store.drops import Drops
from kp_scorer.store.keys import Keys
from kp_scorer.store.redis_ledger import RedisLedger
from kp_scorer.store.redis_log import RedisLog, find_logs
from kp_scorer.store.suitability import memory_used, shortcomings
from kp_scorer.store.tallies import Tallies
from kp_scorer.store.workers import Workers


class Store:
    """The ledger, the dead letters and the novelty logs under one prefix. A context manager; it connects on first use."""

    def __init__(self, client: redis.Redis, settings: Settings, on_burial: OnBurial = nobody_told) -> None:
        """Use what lies behind ``client``, which the store owns from now on; ``on_burial`` is told of dead letters kept."""
        self._client = client
        self._settings = settings
        self._keys = Keys(settings.redis.prefix)
        self.ledger = RedisLedger(client, self._keys, settings.ledger.ttl_ms)
        self.dead_letters = DeadLetters(client, self._keys, settings.ledger, on_burial)
        self.workers = Workers(client, self._keys)
        self.drops = Drops(client, self._keys)
        self.tallies = Tallies(client, self._keys)

    @classmethod
    def open(cls, settings: Settings, on_burial: OnBurial = nobody_told) -> Self:
        """Make a store for the Redis that the settings name; ``on_burial`` is told the reason of each dead letter kept."""
        return cls(connect(settings.redis), settings, on_burial)

    def ping(self) -> None:
        """Return if Redis answers.

        Raises:
            ServiceUnavailable: it does not.
        """
        with unavailable_if_down("redis.url"):
            self._client.ping()

    def shortcomings(self) -> list[str]:
        """What this Redis is not set up for, each with its remedy.

        Raises:
            ServiceUnavailable: Redis cannot be reached, or does not say.
        """
        with unavailable_if_down("redis.url"):
            return list(shortcomings(self._client.info()))

    def memory_used(self) -> float | None:
        """Of the memory that Redis may take, the share taken; 0 where it may take all, None where this user may not ask.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("redis.url"):
            try:
                return memory_used(self._client.info("memory"))
            except redis.exceptions.ResponseError:
                # A user who may not ask, or a server that has no such command, does everything else.
                return None

    def clock_ahead_s(self) -> float:
        """How many seconds the clock of Redis is ahead of this machine's; less than 0 if it is behind.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        asked_at_s = time.time()
        with unavailable_if_down("redis.url"):
            seconds, microseconds = self._client.time()
        return seconds + microseconds / 1e6 - (asked_at_s + time.time()) / 2

    def decision_stream(self, name: str) -> DecisionStream:
        """A stream of decisions, which need not exist yet."""
        return DecisionStream(self._client, self._keys, name)

    def novelty_log(self, space: str) -> RedisLog:
        """The log of a space, which need not exist yet; its vectors are stored as the settings say."""
        settings = self._settings
        window, dtype = settings.novelty.window(), settings.novelty.vector_dtype
        return RedisLog(self._client, self._keys, space, window, settings.ledger.ttl_ms, dtype)

    def novelty_logs(self) -> list[RedisLog]:
        """The logs that exist, of whatever space.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        return find_logs(self._client, self._keys, self._settings.novelty.window(), self._settings.ledger.ttl_ms)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
