"""How many messages RabbitMQ loses whose confirm nobody waits for; counted, not timed. Needs a RabbitMQ, see TEST_RABBITMQ_URL.

Channels are opened one after the other, each with a connection of its own. Each sends some messages to a quorum queue and is
closed at once: with confirms, and without.

- ``sent``: messages.
- ``lost``: those that are not on the queue when it has not grown for five seconds.
- ``channels_with_losses``: of how many channels at least one is not.
"""

import argparse
import time
import uuid
from collections import Counter
from typing import Final

import amqp
from kombu import Connection

from tests.benchmarks.common import Row, emit, say, show_table
from tests.support.rabbitmq import RABBITMQ_URL, confirming

_SETTLE_S: Final = 5.0
_COLUMNS: Final = {
    "confirms": "confirms",
    "channels": "channels",
    "sent": "sent",
    "lost": "lost",
    "channels_with_losses": "channels with losses",
}


def main() -> None:
    """Count both ways and write one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=1_000, metavar="N", help="channels each way (default: 1000)")
    parser.add_argument("--messages", type=int, default=50, metavar="N", help="messages of each channel (default: 50)")
    options = parser.parse_args()
    rows = []
    for confirms in (False, True):
        say(f"{options.channels} channels, {'with' if confirms else 'without'} confirms")
        rows.append(count(options.channels, options.messages, confirms=confirms))
        emit(rows[-1])
    show_table(rows, _COLUMNS)


def count(channels: int, messages: int, *, confirms: bool) -> Row:
    """Send so many messages by each of so many channels, and count what comes."""
    name = f"unconfirmed-{uuid.uuid4().hex}"
    with Connection(RABBITMQ_URL) as connection, connection.channel() as control:
        control.queue_declare(name, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
        try:
            for number in range(channels):
                _send(name, b"%d" % number, messages, confirms=confirms)
            _wait_until_settled(control, name)
            came = Counter[str]()
            while message := control.basic_get(name, no_ack=True):
                came[message.body] += 1
        finally:
            control.queue_delete(name)
    return {
        "benchmark": "unconfirmed",
        "confirms": confirms,
        "channels": channels,
        "sent": channels * messages,
        "lost": channels * messages - came.total(),
        "channels_with_losses": channels - sum(arrived == messages for arrived in came.values()),
    }


def _send(queue: str, body: bytes, messages: int, *, confirms: bool) -> None:
    sender = confirming(RABBITMQ_URL) if confirms else Connection(RABBITMQ_URL)
    with sender as connection, connection.channel() as channel:
        for _ in range(messages):
            channel.basic_publish(amqp.Message(body), routing_key=queue)


def _wait_until_settled(channel: amqp.Channel, queue: str) -> None:
    """Wait until the number of messages on the queue has stayed the same for a while."""
    found, since = -1, time.monotonic()
    while time.monotonic() - since < _SETTLE_S:
        now = int(channel.queue_declare(queue, passive=True).message_count)
        if now != found:
            found, since = now, time.monotonic()
        time.sleep(0.2)


if __name__ == "__main__":
    main()
