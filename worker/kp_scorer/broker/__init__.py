"""The broker: its queues, and how traces and decisions are put on them and taken off, on Redis and on RabbitMQ."""
