"""The Redis of the test, which can be read as a whole in one step and reset to an earlier state."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis
import structlog

from tests.model.patched_scripts import DEADLINES_KEY, NOW_KEY
from tests.support.servers import embedded_default

# The script returns the name, the type and the content of each of our keys.
_DUMP: Final = """
local kinds = {hash = {'HGETALL'}, zset = {'ZRANGE', 0, -1, 'WITHSCORES'}, string = {'GET'}, stream = {'XRANGE', '-', '+'}}
local found = {}
for _, key in ipairs(redis.call('KEYS', 'm*')) do
    local kind = redis.call('TYPE', key).ok
    found[#found + 1] = {key, kind, redis.call(kinds[kind][1], key, unpack(kinds[kind], 2))}
end
return found
"""


Image = dict[bytes, Any]
"""All keys and their contents at one moment, in the form in which Redis restores them."""

Dump = dict[str, Any]
"""The values of all keys by name: hashes as bytes by field, sorted sets as integers by member, others as Redis returns them."""


def _pairs(content: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    return ((name.decode(), value) for name, value in zip(content[::2], content[1::2], strict=True))


def _readable(kind: bytes, content: Any) -> Any:
    if kind == b"hash":
        return dict(_pairs(content))
    if kind == b"zset":
        return {member: int(float(score)) for member, score in _pairs(content)}
    return content


class Server:
    """A connection to a Redis that belongs to the test."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        # Trim streams at once, which Redis by default only does when a node is full. Write no file, as nothing outlives the
        # test.
        client.config_set("stream-node-max-entries", 1)
        client.config_set("appendonly", "no")
        self._dump = client.register_script(_DUMP)

    def clear(self, now: int) -> None:
        self.client.flushdb()
        self.set_time(now)

    def set_time(self, now: int) -> None:
        self.client.set(NOW_KEY, now)

    def read(self) -> Dump:
        """Return every key but the test's clock, all read at one moment."""
        rows: Any = self._dump()
        contents = {key.decode(): _readable(kind, content) for key, kind, content in rows}
        contents.pop(NOW_KEY, None)
        return contents

    def delete(self, keys: list[str]) -> None:
        """Delete keys whose lifetime has ended, as Redis would."""
        if keys:
            self.client.delete(*keys)
            self.client.zrem(DEADLINES_KEY, *keys)

    def image(self) -> Image:
        keys: Any = self.client.keys("m*")
        return {key: self.client.dump(key) for key in keys if key != NOW_KEY.encode()}

    def put_back(self, image: Image, now: int) -> None:
        """Restore all keys of an image, as Redis does after a restart; only the time has gone on."""
        self.clear(now)
        for key, value in image.items():
            self.client.restore(key, 0, value)


@contextmanager
def running(directory: Path) -> Iterator[Server]:
    """Run a server during the block, without log lines, of which there would be one for each dead letter."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        with embedded_default(directory) as url, redis.Redis.from_url(url) as client:
            yield Server(client)
    finally:
        structlog.configure(**before)
