"""What lies on the broker: the queues, how traces and decisions are put on them and taken off, on Redis and on RabbitMQ."""
