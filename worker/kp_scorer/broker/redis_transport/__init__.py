"""Kombu's Redis transport with at-least-once delivery, whose consumer no message can stop."""

from kp_scorer.broker.redis_transport.channel import Channel, SentinelTransport, Transport

__all__ = ["Channel", "SentinelTransport", "Transport"]
