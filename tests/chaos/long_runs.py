"""The code that the long runs of this tier share: arguments, arena, traces and reports."""

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment

from tests.support.arena import Arena
from tests.support.commands import run
from tests.support.paths import REFERENCE_TRACES
from tests.support.rabbitmq import RABBITMQ_URL, own_queues, own_virtual_host
from tests.support.traces import new_id, rows_in, sample_traces


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--broker", choices=["redis", "rabbitmq"], default="redis")
    parser.add_argument("--seed", type=int, default=0)
    return parser


_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


def perform(
    chosen: argparse.Namespace,
    on_arena: Callable[[Arena, argparse.Namespace], dict[str, Any]],
    queues: Mapping[str, Any] = _NONE,
) -> int:
    """Run ``on_arena`` in a new arena and print its summary as JSON; return 1 if the summary names a violation, else 0.

    ``queues`` overrides settings of the arena's queues, whose names are unique by default.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        own_virtual_host(RABBITMQ_URL) if chosen.broker == "rabbitmq" else nullcontext("") as url,
        Arena(chosen.broker, url, Path(directory), {**own_queues(), **queues}) as arena,
    ):
        summary = on_arena(arena, chosen)
    print(json.dumps(vars(chosen) | summary))  # noqa: T201
    return 1 if summary["violation"] else 0


def say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


def run_command(*words: str, settings: Settings, stdin: str = "") -> None:
    """Run a command, show its stderr, and fail unless it succeeds."""
    done = run(*words, stdin=stdin, **as_environment(settings))
    say(done.stderr)
    assert done.returncode == 0, done.stderr


def traces(count: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the reference's traces if they are available, else the samples; when they repeat, their words are shuffled."""
    path = REFERENCE_TRACES / "traces.jsonl"
    templates = rows_in(path.read_text("utf-8")) if path.exists() else sample_traces()
    for place, trace in enumerate(itertools.islice(itertools.cycle(templates), count)):
        words = trace["task"]["objective"].split()
        objective = " ".join(chance.sample(words, len(words))) if place >= len(templates) else trace["task"]["objective"]
        yield trace | {"id": new_id(), "task": trace["task"] | {"objective": objective}}
