"""Traces for tests: the shipped samples, with ids of their own."""

import json
import uuid
from importlib import resources
from typing import Any


def sample_traces() -> list[dict[str, Any]]:
    """The shipped samples, as they are."""
    text = resources.files("worker.samples").joinpath("traces.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def fresh_samples(count: int) -> list[dict[str, Any]]:
    """So many of the samples under new ids."""
    return [trace | {"id": new_id()} for trace in sample_traces()[:count]]


def new_id() -> str:
    """An id that no other trace has."""
    return f"kp:trace:{uuid.uuid4()}"
