"""A TCP proxy in front of a real server, for tests of what a bad network does."""

import asyncio
import ssl
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

Result = TypeVar("Result")

_ANSWER_S = 10.0


class _Connection:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writers = [writer]
        self.serving = asyncio.current_task()
        self.lost = False

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """A TCP proxy that passes bytes both ways. It runs in a thread of its own; any thread may call its methods."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        """Stand in front of the server that ``url`` names; with ``tls``, clients connect to the proxy by TLS."""
        self._target = urlsplit(url)
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._connections: set[_Connection] = set()
        self._requests, self._replies, self._refused = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def url(self) -> str:
        user, at, _ = self._target.netloc.rpartition("@")
        return urlunsplit(self._target._replace(netloc=f"{user}{at}127.0.0.1:{self._port}"))

    def hold(self) -> None:
        """Deliver nothing and close nothing. What either side sends waits here, as unacknowledged packets do."""
        self._do(self._requests.clear, self._replies.clear)

    def hold_replies(self) -> None:
        """Deliver what clients send, and hold what the server answers."""
        self._do(self._replies.clear)

    def deliver(self) -> None:
        self._do(self._requests.set, self._replies.set)

    def forget(self) -> None:
        """Deliver again, but only on new connections. Present ones stay open and silent for ever."""
        self._do(self._lose_all, self._requests.set, self._replies.set)

    def cut(self) -> None:
        self._do(self._abort_all)

    def refuse(self) -> None:
        """Reset all connections, and new ones as soon as they are made."""
        self._do(self._refused.set, self._abort_all)

    def accept(self) -> None:
        self._do(self._refused.clear)

    def redirect(self, url: str) -> None:
        """Pass new connections to another server; present ones keep theirs."""
        self._target = urlsplit(url)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._requests.set, self._replies.set)
        self._run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_S)
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_ANSWER_S)

    def _do(self, *actions: Any) -> None:
        async def act() -> None:
            for action in actions:
                action()

        self._run(act())

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", ssl=self._tls)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        serving = [connection.serving for connection in self._connections if connection.serving]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        # The loop closes the connections that were reset only in its next round.
        await asyncio.sleep(0)

    def _lose_all(self) -> None:
        for connection in self._connections:
            connection.lost = True

    def _abort_all(self) -> None:
        for connection in self._connections:
            connection.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        if self._refused.is_set():
            connection.abort()
            return
        self._connections.add(connection)
        ways: list[asyncio.Task[None]] = []
        try:
            to_reader, to_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
            connection.writers.append(to_writer)
            ways.append(asyncio.create_task(self._pump(reader, to_writer, self._requests, connection)))
            ways.append(asyncio.create_task(self._pump(to_reader, writer, self._replies, connection)))
            # Once one side has closed the connection, the other one must be closed, too.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            # Ignore both errors: the client is about to find out that the server is down, and asyncio would complain of a
            # cancelled handler when the proxy closes.
            pass
        finally:
            connection.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._connections.discard(connection)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event, connection: _Connection
    ) -> None:
        try:
            while data := await reader.read(65_536):
                await gate.wait()
                if not connection.lost:
                    writer.write(data)
                    await writer.drain()
            # The end of a stream is a packet too, so it waits for delivery as data does.
            await gate.wait()
            if connection.lost:
                await asyncio.Event().wait()
        except OSError:
            pass
