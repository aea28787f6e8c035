"""Reads the bodies of requests within limits of size, memory and time."""

import asyncio
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import anyio.to_thread
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kp_scorer.errors import QueueFull

BODIES: Final = 8  # The most bodies of the largest size that may be in memory at once; requests beyond them get 429.
REQUESTS: Final = 256  # The most requests of one token in progress at once: half of the connections that the server keeps.
_BODY_WITHIN_S: Final = 20.0

Result = TypeVar("Result")


class Bodies:
    """The bodies in memory, counted by token, so that no token keeps the others out."""

    def __init__(self, most_bytes: int, tokens: int) -> None:
        """Admit bodies of up to ``most_bytes``, unpacked. If there is more than one token, each may use half of the memory."""
        self._most_bytes = most_bytes
        self._bytes_in_memory, self._requests = Counter[str](), Counter[str]()
        self._turns = defaultdict[tuple[str, anyio.CapacityLimiter], asyncio.Lock](asyncio.Lock)
        self._most_of_one = BODIES * most_bytes // (2 if tokens > 1 else 1)

    @contextmanager
    def counted(self, token: str) -> Iterator[None]:
        """Count a request as in progress during the block; raise QueueFull if its token has too many."""
        self._requests[token] += 1
        try:
            if self._requests[token] > REQUESTS:
                raise QueueFull("serve: too many requests at once with this token")
            yield
        finally:
            self._requests[token] -= 1

    async def work_on(self, request: Request, limiter: anyio.CapacityLimiter, work: Callable[[bytes], Result]) -> Result:
        """Receive a body, unpack it and do the work on it in a thread, and return the result.

        Raises HTTPException if the body is too large, too slow or not as declared, and QueueFull if there are too many.
        """
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip"):
            raise HTTPException(415, "expected Content-Encoding gzip, or none")
        token, most, body = request.state.token, self._most_bytes, bytearray()
        try:
            async with asyncio.timeout(_BODY_WITHIN_S):
                async for chunk in request.stream():
                    body += chunk
                    self._bytes_in_memory[token] += len(chunk)
                    if len(body) > most:
                        raise _too_large(most)
                    of_all = self._bytes_in_memory.total()
                    if self._bytes_in_memory[token] > self._most_of_one or of_all > BODIES * most:
                        raise QueueFull("serve: too many requests at once")
            # Unpack in the token's turn: a few packed kilobytes keep a processor busy for longer than their request does.
            return await self.in_turn(
                request, limiter, lambda: work(unpacked(body, most) if encoding == "gzip" else bytes(body))
            )
        except TimeoutError:
            raise HTTPException(408, f"expected the request within {_BODY_WITHIN_S:g} s") from None
        except zlib.error:
            raise HTTPException(400, "expected gzip") from None
        except ClientDisconnect:
            # gRPC does not say which of the two it was.
            raise HTTPException(400, f"the peer disconnected, or sent more than {most} bytes over gRPC") from None
        finally:
            self._bytes_in_memory[token] -= len(body)

    async def in_turn(self, request: Request, limiter: anyio.CapacityLimiter, work: Callable[[], Result]) -> Result:
        """Work on a request in a thread, and return the result.

        Only one request of each token is worked on at a time, so that a token with many of them delays another's by no more
        than one.
        """
        async with self._turns[request.state.token, limiter]:
            if await request.is_disconnected():
                # Impatient peers send their requests again: without this, each attempt would delay the next ones.
                raise QueueFull("serve: the peer gave up before its request's turn came")
            working = asyncio.ensure_future(anyio.to_thread.run_sync(work, limiter=limiter))
            try:
                await asyncio.wait([working])
            except asyncio.CancelledError:
                # gRPC cancels a request once its peer gives up, but its thread goes on. Otherwise the next one would begin at
                # once, and impatient peers would have any number of bodies parsed at the same time.
                await asyncio.wait([working])
                working.exception()  # Otherwise asyncio logs the error.
                raise
            return working.result()


def unpacked(packed: bytes | bytearray, most: int, wbits: int = 31) -> bytes:
    """Return the content of a gzip stream, or one in another format of zlib that ``wbits`` names.

    Raises HTTPException unless it is a single whole stream of at most ``most`` bytes, and zlib.error if it is damaged.
    """
    unpacking = zlib.decompressobj(wbits)
    content = unpacking.decompress(packed, most + 1)
    if len(content) > most:
        raise _too_large(most)
    if not unpacking.eof or unpacking.unused_data:
        raise HTTPException(400, "expected one whole gzip stream")
    return content


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"expected at most {most} bytes")
