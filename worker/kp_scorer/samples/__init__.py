"""Hand-written samples: ``traces.jsonl``, for the demo and for tests, and ``chats.jsonl``, the log of a notebook."""
