"""Kombu's Redis transport with at-least-once delivery. No message can stop its consumer."""
