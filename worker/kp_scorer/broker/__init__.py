"""The broker: its queues, and how traces and decisions are published and consumed, on Redis and on RabbitMQ."""
