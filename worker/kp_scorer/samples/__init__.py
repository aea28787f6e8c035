"""Hand-written sample traces: ``traces.jsonl``, for the demo and for tests."""
