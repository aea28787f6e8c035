"""Kombu's Redis transport, but a message is noted in the instant it is taken, and no message can stop its consumer."""

from kp_scorer.broker.redis_transport.channel import Channel, Transport
from kp_scorer.broker.redis_transport.sentinel import SentinelTransport

__all__ = ["Channel", "SentinelTransport", "Transport"]
