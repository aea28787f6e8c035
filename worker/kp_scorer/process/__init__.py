"""A worker process: the road of a message through it, its runtime, and its maintenance services."""
