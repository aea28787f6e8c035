"""Measures the check for secrets: its time for a trace, the planted secrets that it finds in real traces, and false alarms.

- ``ms``: the processor time per trace, in the process of the checks and in the worker together, over ``--embedded`` real
  traces: the best of three rounds after a warm-up. ``of_embedding`` and ``of_validation`` divide it by the time to embed and
  to decode the same traces on the same cores.
- ``rss_mb``: the resident memory of the process of the checks.
- ``start_s``, ``start_uncompiled_s``: the time to start it, with compiled rules and without.
- ``alarms``: the false alarms per thousand real traces, in which nothing is planted.
- ``recall``: the share of secrets that are found, by kind. Each is made in the format of its kind, and planted at a random
  place in a text of a real trace.
- ``hostile_s``: the longest time for a trace with a megabyte of texts that nearly are secrets.
- ``endless_s``: the time for a trace at which a check never ends, and for the next one; 0.5 s of it are the check's limit.
"""

import json
import os
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import psutil
from kp_scorer.checks.asking import Checks
from kp_scorer.limits import Limits
from kp_scorer.settings import load_settings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import MB, Row, arguments, cpu_seconds, real_embedder, report, say, seconds_of, typical
from tests.support.builders import decode_json, make_trace
from tests.support.own_checks import install
from tests.support.planted import HOSTILE, SECRETS

_ROUNDS: Final = 3
_STEP_CHARS: Final = 90_000


def main() -> None:
    options = arguments(__doc__, planted=100, embedded=100).parse_args()
    traces = typical()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["KF_RULE_CACHE_DIR"] = cache
        noting = load_settings({"checks.secrets": "note"}).checks
        uncompiled_s, start_s = (seconds_of(lambda: Checks(noting).close()) for _ in range(2))
        checks = Checks(load_settings({"checks.secrets": "reject"}).checks)
        alarms = [kinds for trace in traces if (kinds := checks.run(trace)[0].kinds)]
        costs = costs_of(checks, traces[: options.embedded])
        hostile_s = max(seconds_of(partial(checks.run, hostile(filler))) for filler in HOSTILE)
        report("checks", [{"start_s": start_s, "start_uncompiled_s": uncompiled_s, **costs}])
        report("checks", [{"traces": len(traces), "alarms": len(alarms) / len(traces) * 1_000, "hostile_s": hostile_s}])
        say(f"alarms: {alarms}")
        report("checks", (recall(checks, kind, traces, options.planted) for kind in SECRETS))
        checks.close()
    report("checks", [{"endless_s": endless_s()}])


def costs_of(checks: Checks, traces: Sequence[ReasoningTrace]) -> Row:
    """Measure the processor time of the check, of embedding and of decoding, which take turns."""
    (process,) = psutil.Process().children()
    embedder = real_embedder()
    texts = [embedder.recipe.text(trace) for trace in traces]
    raws = [trace.model_dump_json(exclude_none=True).encode() for trace in traces]
    rounds = [
        (
            seconds_of(lambda: [checks.run(trace) for trace in traces], lambda: cpu_seconds() + cpu_seconds(process)),
            seconds_of(lambda: [embedder.embed([text]) for text in texts], cpu_seconds),
            seconds_of(lambda: [decode_json(raw, Limits()).digest() for raw in raws], cpu_seconds),
        )
        for _ in range(_ROUNDS + 1)
    ]
    check_ms, embed_ms, decode_ms = (min(seconds) * 1_000 / len(traces) for seconds in zip(*rounds[1:], strict=True))
    return {
        "ms": check_ms,
        "embed_ms": embed_ms,
        "of_embedding": check_ms / embed_ms,
        "of_validation": check_ms / decode_ms,
        "rss_mb": process.memory_info().rss / MB,
    }


def recall(checks: Checks, kind: str, traces: Sequence[ReasoningTrace], count: int) -> Row:
    """Plant secrets of a kind in real traces; return the share that the check finds."""
    chance = random.Random(kind)
    seen = 0
    for _ in range(count):
        trace = chance.choice(traces)
        number = chance.randrange(len(trace.steps))
        content = trace.steps[number].content or trace.task.objective
        place, around = chance.randrange(len(content) + 1), chance.choice(["\n", " ", '"', "\t"])
        planted = content[:place] + around + SECRETS[kind](chance) + around + content[place:]
        step = trace.steps[number].model_copy(update={"content": planted})
        steps = (*trace.steps[:number], step, *trace.steps[number + 1 :])
        seen += bool(checks.run(trace.model_copy(update={"steps": steps}))[0].kinds)
    return {"kind": kind, "recall": seen / count}


def hostile(filler: str) -> ReasoningTrace:
    """Return a trace with nearly a megabyte of a repeated text."""
    text = filler * (_STEP_CHARS // (len(json.dumps(filler)) - 2))
    return make_trace(steps=[{"step_id": number, "type": "thought", "content": text} for number in range(11)])


def endless_s() -> float:
    """Return the time for a trace at which a check never ends, and for the next one, for which the process is restarted."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PYTHONPATH"] = install(Path(directory))
        checks = Checks(load_settings({"checks.own": {"misbehave": "note"}}).checks)
        taken_s = seconds_of(lambda: [checks.run(make_trace(objective="loop")), checks.run(make_trace())])
        checks.close()
    return taken_s


if __name__ == "__main__":
    main()
