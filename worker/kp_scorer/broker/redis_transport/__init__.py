"""Kombu's Redis transport with at-least-once delivery, whose consumer no message can stop."""
