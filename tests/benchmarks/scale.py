"""Measures how well one Redis serves 1, 2, 4 and 8 workers, as far as there are cores, with each embedder.

Traces are put on the queue in portions while the workers are paused, then decided and published at full speed. Workers, Redis,
the client and the reader of decisions share the machine. All figures are medians of the portions.

- ``traces_per_s``: the traces decided and published per second.
- ``cpu_ms``, ``redis_cpu_ms``: the processor time per trace of all workers, and of Redis.
- ``commands``: the commands that Redis executes per trace, including those within scripts, from the first receive until the
  decision is read from its queue; ``by_command`` has the most frequent ones.
- ``submit_redis_cpu_ms``, ``submit_commands``: the same figures for the client's submission of a trace.

``--embedders none`` measures workers without an embedder only.
"""

import os
from statistics import median
from typing import Final

from tests.benchmarks.common import Row, arguments, batches, report, say
from tests.benchmarks.load import Speed, open_bench, traces

_EMBEDDERS: Final = ("none", "words", "auto")
_WORKERS: Final = (1, 2, 4, 8)
_SHOWN_FROM: Final = 0.1  # Rarer commands are left out of ``by_command``.


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = arguments(__doc__, traces=2_000, portions=3, workers=[each for each in _WORKERS if each <= cores])
    parser.add_argument("--embedders", choices=_EMBEDDERS, nargs="*", default=_EMBEDDERS, help="(default: all)")
    options = parser.parse_args()
    cases = ((embedder, workers) for embedder in options.embedders for workers in options.workers)
    report("scale", (_row(embedder, workers, options.traces, options.portions) for embedder, workers in cases))


def _row(embedder: str, workers: int, count: int, portions: int) -> Row:
    speeds: list[Speed] = []
    with open_bench({"embedding.embedder": embedder}, workers) as bench:
        redis_version = bench.redis_client.info("server")["redis_version"]
        for portion in batches(traces(workers * count * portions), workers * count):
            speeds.append(bench.decide(portion))
            say(f"{embedder}, {workers} workers: {speeds[-1].per_s:,.0f}/s, {speeds[-1].deciding.cpu_ms:.3f} ms of Redis")
    middle = sorted(speeds, key=lambda speed: sum(speed.deciding.commands.values()))[len(speeds) // 2]
    return {
        "embedder": embedder,
        "workers": workers,
        "redis": redis_version,
        "traces_per_s": median(speed.per_s for speed in speeds),
        "cpu_ms": median(speed.cpu_ms for speed in speeds),
        "redis_cpu_ms": median(speed.deciding.cpu_ms for speed in speeds),
        "commands": median(sum(speed.deciding.commands.values()) for speed in speeds),
        "submit_redis_cpu_ms": median(speed.submitting.cpu_ms for speed in speeds),
        "submit_commands": median(sum(speed.submitting.commands.values()) for speed in speeds),
        "by_command": ", ".join(f"{name} {n:.2f}" for name, n in middle.deciding.commands.items() if n >= _SHOWN_FROM),
    }


if __name__ == "__main__":
    main()
