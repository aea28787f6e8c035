"""What a worker process is: what it holds open, when it opens and closes it, and how a message becomes a decision in it."""
