"""Publish many messages to RabbitMQ and wait once, for all its confirms together."""

import time
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, proxy

import amqp
from amqp.exceptions import RecoverableConnectionError


class ConfirmingChannel:
    """A channel on which nothing else publishes, so that each confirm is known by its number."""

    def __init__(self, connection: Any) -> None:
        """Open a channel of a py-amqp connection."""
        channel = connection.channel()
        channel.confirm_select()
        channel.events["basic_ack"].add(self._taken)
        channel.events["basic_nack"].add(self._refused)
        # The connection keeps it. Kept here as well, it would keep the connection for ever.
        self._channel = proxy(channel)
        self._published = 0
        self.is_broken = False
        """Whether an error has ended its use."""
        self._unconfirmed: set[int] = set()
        self._nacked: set[int] = set()

    def publish_all(self, messages: Sequence[amqp.Message], exchange: str, routing_key: str, timeout_s: float) -> list[bool]:
        """Publish messages, in order; tell of each whether RabbitMQ took it.

        Raises:
            amqp.exceptions.ChannelError: there is no such exchange, or no queue behind it.
            amqp.exceptions.RecoverableConnectionError: no confirm came within ``timeout_s`` of the one before. The connection
                cannot be used any longer: what comes late would be taken for something else.
        """
        self.is_broken = True
        first = self._published + 1
        self._published += len(messages)
        self._unconfirmed = set(range(first, first + len(messages)))
        self._nacked.clear()
        for message in messages:
            # By the class: on the channel py-amqp has put what waits for the confirm of each.
            amqp.Channel.basic_publish(self._channel, message, exchange, routing_key, mandatory=True, timeout=timeout_s)
        deadline = time.monotonic() + timeout_s
        left = len(self._unconfirmed)
        while self._unconfirmed:
            if len(self._unconfirmed) < left:
                left, deadline = len(self._unconfirmed), time.monotonic() + timeout_s
            if (left_s := deadline - time.monotonic()) <= 0:
                raise RecoverableConnectionError("no confirm in time")
            self._channel.connection.drain_events(timeout=left_s)
        self.is_broken = False
        return [number not in self._nacked for number in range(first, first + len(messages))]

    def _taken(self, number: int, multiple: bool) -> None:
        self._confirmed(number, multiple)

    def _refused(self, number: int, multiple: bool) -> None:
        self._nacked.update(self._confirmed(number, multiple))

    def _confirmed(self, number: int, multiple: bool) -> set[int]:
        confirmed = {each for each in self._unconfirmed if each <= number} if multiple else {number}
        self._unconfirmed -= confirmed
        return confirmed


_CHANNELS: Final[WeakKeyDictionary[Any, ConfirmingChannel]] = WeakKeyDictionary()


def confirming_channel(connection: Any) -> ConfirmingChannel:
    """The confirming channel of a py-amqp connection, opened when it is first asked for. One thread at a time may use it."""
    found = _CHANNELS.get(connection)
    if found is None or found.is_broken:
        _CHANNELS[connection] = ConfirmingChannel(connection)
    return _CHANNELS[connection]
