"""Sends large answers in parts, and bounds the memory of those that peers have not read yet."""

import asyncio
from collections import Counter
from typing import Any, Final

from kp_scorer.errors import QueueFull

_MOST_UNREAD_BYTES: Final = 67_108_864  # Once unread answers take this much memory, requests with large answers get 429.
_PART_BYTES: Final = 65_536
_READ_WITHIN_S: Final = 60.0  # A peer that takes longer to read its answer is disconnected.


class Answers:
    """The large answers in memory, counted by token, so that no token keeps the others out."""

    def __init__(self, tokens: int) -> None:
        """Admit answers. If there is more than one token, each may use half of the memory."""
        self._unread_bytes = Counter[str]()
        self._most_of_one = _MOST_UNREAD_BYTES // (2 if tokens > 1 else 1)

    def check_room(self, token: str) -> None:
        """Raise QueueFull if the memory for this token's answers is used up. The last answer may take more than is left."""
        if self._unread_bytes[token] >= self._most_of_one or self._unread_bytes.total() >= _MOST_UNREAD_BYTES:
            raise QueueFull("serve: too many answers that are not read")

    def bounded(self, app: Any) -> Any:
        """Return an ASGI application wrapped so that a peer gets the next part of an answer once it reads the last one."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_on(message: Any) -> None:
                body: bytes = message.get("body", b"")
                if len(body) <= _PART_BYTES:
                    await send(message)
                    return
                token = scope["state"].get("token", "")
                self._unread_bytes[token] += len(body)
                try:
                    async with asyncio.timeout(_READ_WITHIN_S):
                        for start in range(0, len(body), _PART_BYTES):
                            await send(message | {"body": body[start : start + _PART_BYTES], "more_body": True})
                            # Let the event loop notice if the peer has gone: asyncio logs each further write.
                            await asyncio.sleep(0)
                        await send(message | {"body": b""})
                finally:
                    self._unread_bytes[token] -= len(body)

            await app(scope, receive, send_on)

        return answer
