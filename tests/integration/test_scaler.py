"""A scaler can count what waits as the user that the documents give it, and no more."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from redis.exceptions import NoPermissionError

from tests.support.paths import REPOSITORY

COUNT = "return redis.call('llen', KEYS[1]) + (redis.call('type', KEYS[1]).ok == 'list' and 0 or 1000)"
"""What KEDA does: it checks the type of a key before it counts."""


@pytest.fixture
def scaler(redis_url: str, redis_client: redis.Redis) -> Iterator[redis.Redis]:
    """A connection of the user that deploy/README.md describes."""
    text = (REPOSITORY / "deploy" / "README.md").read_text("utf-8")
    rules = re.search(r"^ +user scaler on >PASSWORD (.+)$", text, re.MULTILINE)
    assert rules
    server: Any = redis_client
    server.execute_command("ACL", "SETUSER", "scaler", "on", ">secret", *rules[1].split())
    with redis.Redis.from_url(f"redis://scaler:secret@127.0.0.1:{urlsplit(redis_url).port}/0") as connection:
        yield connection
    server.acl_deluser("scaler")


def test_the_scaler_counts_waiting_messages_and_cannot_read_them(scaler: redis.Redis, redis_client: redis.Redis) -> None:
    redis_client.lpush("traces", "one", "two")
    assert scaler.eval(COUNT, 1, "traces") == 2
    for forbidden in ("return redis.call('lindex', KEYS[1], 0)", "return redis.call('rpop', KEYS[1])"):
        with pytest.raises(redis.ResponseError):
            scaler.eval(forbidden, 1, "traces")
    with pytest.raises(NoPermissionError):
        scaler.llen("decisions.accepted")
    assert redis_client.llen("traces") == 2
