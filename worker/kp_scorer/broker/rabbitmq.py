"""Additions to py-amqp: publish many messages and wait once for all confirms; bound and check frames before it parses them."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from struct import pack_into, unpack_from
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, proxy

import amqp
from amqp import method_framing
from amqp.exceptions import AMQPError, RecoverableConnectionError
from amqp.serialization import decode_properties_basic
from kombu.transport import pyamqp

from kp_scorer.broker.wire import BEGINNING_BYTES, SENT_MS, headers_as_sent, leave_packed, note_sent, raw_body, sent_ms_in
from kp_scorer.errors import BrokerBlocked
from kp_scorer.spans.context import context_in

_HEADERS: Final = ("task", "id", "ignore_result", "compression")
"""The headers that a worker reads, beside the context. RabbitMQ would act on others, such as where to send copies."""
_NO_TEXT: Final = "?"  # Replaces a header that is no text: py-amqp reads values that it cannot write.

_NO_QUEUE: Final = "kp-scorer.no-queue"  # No queue has this name, and none is bound by it.

_LOOK_S: Final = 0.01

_CONTENT_HEADER: Final = 2
_CONTENT_BODY: Final = 3
_BODY_SIZE_AT: Final = 4
_BEFORE_PROPERTIES: Final = 12
_NO_PROPERTIES: Final = b"\0\0"


def anew(message: Any) -> amqp.Message:
    """A kombu message to be published again: its content and, of its producer's headers, those that a worker reads."""
    headers = headers_as_sent(message.headers)
    named = ((name, headers[name]) for name in _HEADERS if name in headers)
    texts: dict[str, Any] = {name: value if isinstance(value, str | bool | None) else _NO_TEXT for name, value in named}
    if (sent_ms := sent_ms_in(headers)) is not None:
        texts[SENT_MS] = sent_ms
    return amqp.Message(
        raw_body(message),
        content_type="application/json" if message.content_type == "application/json" else "application/octet-stream",
        application_headers=texts | dict(context_in(headers)),
        delivery_mode=2,
    )


class Transport(pyamqp.Transport):  # type: ignore[misc]  # kombu ships no types
    """Reads user and password anew for each connection, where a file has them; for the setting ``broker_transport``."""

    def establish_connection(self) -> Any:
        """Connect."""
        if self.client.credential_provider:
            *user, self.client.password = self.client.credential_provider.get_credentials()
            self.client.userid = "".join(user)
        connection = super().establish_connection()
        _OPENED.add(connection)
        return connection


_OPENED: Final[WeakSet[Any]] = WeakSet()


def _leave_to_parent() -> None:
    """Give up, in a child, the connections that its parent made: what both wrote there would be mixed."""
    _BLOCKED.clear()
    for connection in list(_OPENED):
        if (transport := connection._transport) and transport.sock:  # noqa: SLF001 - py-amqp would end it for the parent, too
            transport.sock.close()
            transport.sock = None
        connection.collect()


os.register_at_fork(after_in_child=_leave_to_parent)


class ConfirmingChannel:
    """A channel on which nothing else publishes, so that the number of a confirm identifies its message."""

    def __init__(self, connection: Any) -> None:
        channel = connection.channel()
        channel.confirm_select()
        channel.events["basic_ack"].add(self._on_ack)
        channel.events["basic_nack"].add(self._on_nack)
        # The connection keeps it. Kept here as well, it would keep the connection for ever.
        self._channel = proxy(channel)
        self._published = 0
        self.is_broken = self.is_blocked = self._is_probed = False
        connection.on_blocked, connection.on_unblocked = partial(self._note, True), partial(self._note, False)
        self._unconfirmed: set[int] = set()
        self._nacked: set[int] = set()

    def publish_all(self, messages: Sequence[amqp.Message], exchange: str, routing_key: str, timeout_s: float) -> list[bool]:
        """Publish messages, in order; return for each whether RabbitMQ accepted it.

        ChannelError if there is no such exchange, or no queue behind it; BrokerBlocked if RabbitMQ has an alarm;
        RecoverableConnectionError if no confirm comes within ``timeout_s`` of the one before. Then the connection cannot be
        used: a late confirm would count for another message.
        """
        if not self._is_probed:
            # What is sent to a blocked RabbitMQ waits in the connection, and is published once the alarm ends: as often as it
            # was tried.
            self.probe(exchange, timeout_s)
        return self._publish(messages, exchange, routing_key, timeout_s, mandatory=True)

    def probe(self, exchange: str, timeout_s: float) -> None:
        """Return once RabbitMQ has accepted messages, which go to no queue. It says that it is blocked to publishers alone.

        Errors as of :meth:`publish_all`.
        """
        # A blocked RabbitMQ accepts the first one of a connection, too.
        self._publish([amqp.Message(), amqp.Message()], exchange, _NO_QUEUE, timeout_s, mandatory=False)
        self._is_probed = True

    def _publish(
        self, messages: Sequence[amqp.Message], exchange: str, routing_key: str, timeout_s: float, *, mandatory: bool
    ) -> list[bool]:
        self.is_broken = True
        first = self._published + 1
        self._published += len(messages)
        self._unconfirmed = set(range(first, first + len(messages)))
        self._nacked.clear()
        for message in messages:
            # By the class: amqp 5.4.2 replaces the method of the channel by one that waits for each confirm.
            amqp.Channel.basic_publish(self._channel, message, exchange, routing_key, mandatory=mandatory, timeout=timeout_s)
        deadline = time.monotonic() + timeout_s
        left = len(self._unconfirmed)
        while self._unconfirmed:
            if len(self._unconfirmed) < left:
                left, deadline = len(self._unconfirmed), time.monotonic() + timeout_s
            # A client waits for timeout_s in all: half of that leaves it time to say why.
            if (left_s := deadline - timeout_s / 2 * self.is_blocked - time.monotonic()) <= 0:
                raise BrokerBlocked if self.is_blocked else RecoverableConnectionError("no confirm in time")
            with suppress(TimeoutError):
                self._channel.connection.drain_events(timeout=left_s)
        self.is_broken = False
        return [number not in self._nacked for number in range(first, first + len(messages))]

    def _note(self, is_blocked: bool, *_: object) -> None:
        self.is_blocked = is_blocked

    def _on_nack(self, number: int, multiple: bool) -> None:
        self._nacked |= self._on_ack(number, multiple)

    def _on_ack(self, number: int, multiple: bool) -> set[int]:
        confirmed = {each for each in self._unconfirmed if each <= number} if multiple else {number}
        self._unconfirmed -= confirmed
        return confirmed


_CHANNELS: Final[WeakKeyDictionary[Any, ConfirmingChannel]] = WeakKeyDictionary()
_BLOCKED: Final[dict[str, Any]] = {}  # A py-amqp connection that is blocked, by host and port.
_asking = threading.Lock()


def confirming_channel(connection: Any) -> ConfirmingChannel:
    """The confirming channel of a py-amqp connection, opened when it is first asked for. One thread at a time may use it.

    BrokerBlocked as long as RabbitMQ has not said on a connection that was set aside that its alarm is over.
    """
    _raise_if_blocked(connection.host)
    channel = _CHANNELS.get(connection)
    if channel is None or channel.is_broken:
        _CHANNELS[connection] = ConfirmingChannel(connection)
    return _CHANNELS[connection]


def set_aside(connection: Any) -> None:
    """Take a kombu connection that is blocked out of use, and keep one such, which says when the alarm is over.

    RabbitMQ reads nothing on it, not even that it is closed: as long as the alarm lasts, each one left would stay there.
    """
    blocked = connection._connection  # noqa: SLF001 - the property would connect
    if (channel := _CHANNELS.get(blocked)) and channel.is_blocked:
        if _BLOCKED.setdefault(blocked.host, blocked) is blocked:
            # So that kombu closes neither: RabbitMQ would not answer.
            connection._connection = connection._default_channel = None  # noqa: SLF001
        connection.collect()


def _raise_if_blocked(host: str) -> None:
    with _asking:
        if not (blocked := _BLOCKED.get(host)):
            return
        try:
            while _CHANNELS[blocked].is_blocked:
                blocked.drain_events(timeout=_LOOK_S)
        except TimeoutError:
            raise BrokerBlocked from None
        except (OSError, AMQPError):
            # It is lost, as when RabbitMQ has restarted.
            pass
        del _BLOCKED[host]
        blocked.collect()


def frame_handler(
    connection: Any, callback: Callable[..., Any], *, largest_bytes: int
) -> Callable[[tuple[int, int, bytes]], bool]:
    """Make py-amqp's own handler of frames, for the option ``frame_handler`` of its connections.

    No body is unpacked, or converted from the encoding that its producer names. Properties that py-amqp cannot read are
    dropped: otherwise it would raise an error in every worker that receives the message, and none could acknowledge it. Of a
    body over ``largest_bytes`` only the beginning is delivered, without properties, so that it does not count as complete:
    py-amqp would join as much as RabbitMQ lets producers send.
    """

    def deliver(channel: int, method: Any, arguments: Any, message: Any) -> Any:
        if message is not None:
            # Some encodings take quadratic time, and others do not preserve the bytes.
            message.properties.pop("content_encoding", None)
            headers = message.properties.setdefault("application_headers", {})
            leave_packed(headers)
            note_sent(headers, message.properties.get("timestamp"))
        return callback(channel, method, arguments, message)

    handle = method_framing.frame_handler(connection, deliver)
    # By channel, on which the frames of a message follow each other: the bytes that are still to come, and the beginning.
    too_large: dict[int, tuple[int, bytes]] = {}

    def handle_harmless(frame: tuple[int, int, bytes]) -> bool:
        kind, channel, payload = frame
        if kind == _CONTENT_HEADER:
            (body_bytes,) = unpack_from(">Q", payload, _BODY_SIZE_AT)
            if body_bytes > largest_bytes:
                too_large[channel] = body_bytes, b""
                payload = _header(payload, BEGINNING_BYTES)
            else:
                try:
                    decode_properties_basic(payload, _BEFORE_PROPERTIES)
                except Exception:
                    # A text that is not UTF-8, a time beyond the calendar, tables nested too deeply for Python: any of many.
                    payload = _header(payload, body_bytes)
        elif kind == _CONTENT_BODY and channel in too_large:
            missing_bytes, beginning = too_large.pop(channel)
            missing_bytes -= len(payload)
            payload = beginning + payload[: BEGINNING_BYTES - len(beginning)]
            if missing_bytes > 0:
                too_large[channel] = missing_bytes, payload
                return False
        return bool(handle((kind, channel, payload)))

    return handle_harmless


def _header(payload: bytes, body_bytes: int) -> bytes:
    """The header of a content, but with this size and without properties."""
    header = bytearray(payload[:_BEFORE_PROPERTIES] + _NO_PROPERTIES)
    pack_into(">Q", header, _BODY_SIZE_AT, body_bytes)
    return bytes(header)
