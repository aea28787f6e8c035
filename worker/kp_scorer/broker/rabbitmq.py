"""Extends py-amqp: it publishes many messages and waits once for all confirms, and bounds and checks frames before parsing."""

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

from kp_scorer.broker.headers import SENT_MS, headers_as_sent, leave_packed, note_sent, sent_ms_in
from kp_scorer.broker.wire import BEGINNING_BYTES, raw_body
from kp_scorer.errors import BrokerBlocked
from kp_scorer.spans.context import context_in

_HEADERS: Final = ("task", "id", "ignore_result", "compression")
"""The headers that a worker reads, beside the context.

RabbitMQ would act on some of the others, for example on one that requests copies.
"""
_NO_TEXT: Final = "?"  # Replaces a header that is not a text: py-amqp reads some values that it cannot write.

_NO_QUEUE: Final = "kp-scorer.no-queue"  # No queue has this name, and none is bound by it.

_LOOK_S: Final = 0.01

_CONTENT_HEADER: Final = 2
_CONTENT_BODY: Final = 3
_BODY_SIZE_AT: Final = 4
_BEFORE_PROPERTIES: Final = 12
_NO_PROPERTIES: Final = b"\0\0"


def anew(message: Any) -> amqp.Message:
    """Return a kombu message to publish again: its content and, of its producer's headers, only those that a worker reads."""
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


class _Connection(pyamqp.Connection):  # type: ignore[misc]  # kombu ships no types
    def __init__(self, *args: Any, largest_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, frame_handler=partial(_frame_handler, largest_bytes=largest_bytes), **kwargs)


class Transport(pyamqp.Transport):  # type: ignore[misc]
    """A transport for ``broker_transport``; if a file has the user and password, it reads them anew for each connection."""

    Connection = _Connection

    def establish_connection(self) -> Any:
        """Connect, with credentials that are read now if a file has them."""
        if self.client.credential_provider:
            *user, self.client.password = self.client.credential_provider.get_credentials()
            self.client.userid = "".join(user)
        connection = super().establish_connection()
        _OPENED.add(connection)
        return connection


_OPENED: Final[WeakSet[Any]] = WeakSet()


def _leave_to_parent() -> None:
    """Drop the parent's connections in a forked child: otherwise the frames of both processes would be mixed."""
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
        # The connection owns this object, and a strong reference back would keep the connection alive forever.
        self._channel = proxy(channel)
        self._timeout_s = connection.connect_timeout
        self._published = 0
        self.is_broken = self.is_blocked = self._is_probed = False
        connection.on_blocked, connection.on_unblocked = partial(self._note, True), partial(self._note, False)
        self._unconfirmed: set[int] = set()
        self._nacked: set[int] = set()

    def publish_all(self, messages: Sequence[amqp.Message], exchange: str, routing_key: str) -> list[bool]:
        """Publish messages, in order; return for each whether RabbitMQ accepted it.

        Raises ChannelError if the exchange does not exist or leads to no queue; BrokerBlocked if RabbitMQ has an alarm;
        RecoverableConnectionError if a confirm takes longer than ``broker.timeout_s`` after the one before. Then the connection
        cannot be used: a late confirm would count for another message.
        """
        if not self._is_probed:
            # During an alarm, RabbitMQ would leave messages in the connection, and publish one copy for each attempt once the
            # alarm ends.
            self.probe(exchange)
        return self._publish(messages, exchange, routing_key, mandatory=True)

    def probe(self, exchange: str = "") -> None:
        """Check that RabbitMQ accepts messages, by two that go to no queue; raise the errors of :meth:`publish_all`."""
        # RabbitMQ reports an alarm only to publishers, and still accepts the first message of a connection then.
        self._publish([amqp.Message(), amqp.Message()], exchange, _NO_QUEUE, mandatory=False)
        self._is_probed = True

    def _publish(self, messages: Sequence[amqp.Message], exchange: str, routing_key: str, *, mandatory: bool) -> list[bool]:
        self.is_broken = True
        timeout_s = self._timeout_s
        first = self._published + 1
        self._published += len(messages)
        self._unconfirmed = set(range(first, first + len(messages)))
        self._nacked.clear()
        for message in messages:
            # Call the method of the class, because amqp 5.4.2 replaces that of the instance with one that waits for each
            # confirm.
            amqp.Channel.basic_publish(self._channel, message, exchange, routing_key, mandatory=mandatory, timeout=timeout_s)
        deadline = time.monotonic() + timeout_s
        left = len(self._unconfirmed)
        while self._unconfirmed:
            if len(self._unconfirmed) < left:
                left, deadline = len(self._unconfirmed), time.monotonic() + timeout_s
            # A client waits for timeout_s in all: half of that leaves time to report the cause.
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
_BLOCKED: Final[dict[str, Any]] = {}  # The blocked py-amqp connection to each server, by host and port.
_asking = threading.Lock()


def confirming_channel(connection: Any) -> ConfirmingChannel:
    """Return the confirming channel of a py-amqp connection; the first call opens it. One thread at a time may use it.

    Raises BrokerBlocked until RabbitMQ has reported the end of its alarm on the connection that was set aside.
    """
    _raise_if_blocked(connection.host)
    channel = _CHANNELS.get(connection)
    if channel is None or channel.is_broken:
        _CHANNELS[connection] = ConfirmingChannel(connection)
    return _CHANNELS[connection]


def set_aside(connection: Any) -> None:
    """Take a blocked kombu connection out of use; keep one for each server, on which RabbitMQ reports the end of its alarm."""
    # RabbitMQ reads nothing from a blocked connection, not even that it is closed: during an alarm, closed ones would pile up.
    blocked = connection._connection  # noqa: SLF001 - the property would connect
    if (channel := _CHANNELS.get(blocked)) and channel.is_blocked:
        if _BLOCKED.setdefault(blocked.host, blocked) is blocked:
            # Otherwise kombu would close the connection and the channel, and wait for RabbitMQ, which would not answer.
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
            # The connection is lost, for example because RabbitMQ has restarted.
            pass
        del _BLOCKED[host]
        blocked.collect()


def _frame_handler(
    connection: Any, callback: Callable[..., Any], *, largest_bytes: int
) -> Callable[[tuple[int, int, bytes]], bool]:
    """Return py-amqp's handler of frames, wrapped so that no message can stop or fill the worker.

    No body is unpacked, or converted from the encoding that its producer names. Properties that py-amqp cannot read are
    dropped: otherwise every worker that receives the message would raise an error, and none could acknowledge it. Of a body
    over ``largest_bytes`` only the beginning is delivered, without properties, so that it does not pass for complete: py-amqp
    would join as much as RabbitMQ lets producers send.
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
    # For each channel, the number of bytes still to come of a message that is too large, and its beginning. The frames of one
    # message follow each other on a channel.
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
                    # Many values fail here: texts that are not UTF-8, times beyond the calendar, tables nested too deeply for
                    # Python.
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
    """Return this frame of a content header with another size of the body, and without properties."""
    header = bytearray(payload[:_BEFORE_PROPERTIES] + _NO_PROPERTIES)
    pack_into(">Q", header, _BODY_SIZE_AT, body_bytes)
    return bytes(header)
