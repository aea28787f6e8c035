"""Traces for tests: the shipped samples under new ids, and short traces made of their words."""

import json
import random
import uuid
from importlib import resources
from typing import Any


def sample_traces() -> list[dict[str, Any]]:
    text = resources.files("kp_scorer.samples").joinpath("traces.jsonl").read_text("utf-8")
    return rows_in(text)


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def fresh_samples(count: int) -> list[dict[str, Any]]:
    """Return the first ``count`` samples under new ids."""
    return [trace | {"id": new_id()} for trace in sample_traces()[:count]]


def short_traces(count: int, seed: int) -> list[dict[str, Any]]:
    """Return short traces, all distinct, which are made of the samples' words so that some of them are alike."""
    shuffle = random.Random(seed)
    samples = sample_traces()
    words = sorted({word for trace in samples for word in trace["task"]["objective"].split()})
    return [
        shuffle.choice(samples)
        | {
            "id": new_id(),
            "task": {"objective": " ".join(shuffle.choices(words, k=12))},
            "steps": [{"step_id": 0, "type": "thought"}, {"step_id": 1, "type": "observation"}],
        }
        for _ in range(count)
    ]


def new_id() -> str:
    return f"kp:trace:{uuid.uuid4()}"
