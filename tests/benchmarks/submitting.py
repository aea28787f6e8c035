"""Measures how fast one process submits to a real Redis, both many traces at once and one by one.

Copies of the real traces with new ids and contents, as parsed JSON, are submitted in portions, each way in turn, so that a
machine that slows down for a minute slows both. The worker is paused meanwhile, so that it does not share the processor.

- ``many_per_s``, ``single_per_s``: the traces per second by ``Client.submit_many`` and by ``Client.submit``, medians of the
  portions.
- ``ratio``: the median ratio of the two.
- ``cpu_ms``: the processor time of this process per trace of ``submit_many``.
"""

import gc
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from kp_scorer.client import Client

from tests.benchmarks.common import arguments, batches, cpu_seconds, report, say, seconds_of
from tests.benchmarks.load import open_bench, paused, traces

Payloads = Sequence[Mapping[str, Any]]


class Portion(NamedTuple):
    """The seconds that a portion took each way, and the processor seconds of ``submit_many``."""

    many_s: float
    single_s: float
    cpu_s: float


def main() -> None:
    options = arguments(__doc__, traces=10_000, portion=1_000).parse_args()
    size = options.portion
    portions: list[Portion] = []
    with open_bench() as bench, paused(bench.process):
        _measure(bench.client, _payloads(2 * 200))
        for _ in batches(range(options.traces), size):
            portions.append(_measure(bench.client, _payloads(2 * size)))
            say(f"{len(portions)}: {size / portions[-1].many_s:,.0f}/s")
    row = {
        "traces": size * len(portions),
        "many_per_s": median(size / portion.many_s for portion in portions),
        "single_per_s": median(size / portion.single_s for portion in portions),
        "ratio": median(portion.single_s / portion.many_s for portion in portions),
        "cpu_ms": median(portion.cpu_s for portion in portions) / size * 1_000,
    }
    report("submitting", [row])


def _payloads(count: int) -> Payloads:
    return [trace.model_dump(mode="json", exclude_none=True) for trace in traces(count)]


def _measure(client: Client, items: Payloads) -> Portion:
    """Submit half of the traces each way, and measure both."""
    many, single = batches(items, len(items) // 2)
    gc.collect()
    cpu_s = cpu_seconds()
    many_s = seconds_of(lambda: client.submit_many(many, timeout_s=600))
    cpu_s = cpu_seconds() - cpu_s
    return Portion(many_s, seconds_of(lambda: [client.submit(payload) for payload in single]), cpu_s)


if __name__ == "__main__":
    main()
