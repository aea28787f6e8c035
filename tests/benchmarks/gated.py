"""Measures the cost of ``routing.gate = "coverage"``: two fleets, one with each gate, take turns with the same traces.

The workers count words. Before the measurement, each fleet decides ``--kept`` traces of each of ``--domains`` domains, all
unlike each other, so that the gate has much to compare with. A tenth of the measured traces is unlike all others. Workers,
Redis, the client and the reader of decisions share the machine.

- ``traces_per_s``: the traces decided and published per second, the median of the portions.
- ``cpu_ms``, ``redis_cpu_ms``: the processor time per trace of all workers, and of Redis.
- ``…_of_score``: each of these in multiples of the same with the gate ``score``, the median of the pairs.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from statistics import median
from typing import Final
from uuid import uuid4

from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, as_new, asking, batches, cut, report, say, typical
from tests.benchmarks.load import Bench, Speed, open_bench

_GATES: Final = ("score", "coverage")
_WORDS: Final = 20
_UNLIKE: Final = 10  # One measured trace in this many is unlike all others.


def main() -> None:
    parser = arguments(__doc__, workers=8, traces=8_000, portions=5, kept=1_000, domains=2)
    options = parser.parse_args()
    report("gated", _rows(options.workers, options.traces, options.portions, options.kept, options.domains))


def _rows(workers: int, count: int, portions: int, kept: int, domains: int) -> list[Row]:
    names = [f"domain-{number}" for number in range(domains)]
    speeds: dict[str, list[Speed]] = {gate: [] for gate in _GATES}
    with ExitStack() as stack:
        # With this share, everything that adds more than a copy is accepted.
        changed: dict[str, object] = {
            "embedding.embedder": "words",
            "routing.share": 0.99,
            "gate.kept_elements": kept * domains,
        }
        benches = {gate: stack.enter_context(open_bench({**changed, "routing.gate": gate}, workers)) for gate in _GATES}
        for bench in benches.values():
            _decide(bench, _unlike(kept * domains, names))
        for portion in batches(_mixed(count * portions, names), count):
            for gate, bench in benches.items():
                speeds[gate].append(_decide(bench, portion))
                say(f"{gate}: {speeds[gate][-1].per_s:,.0f}/s, {speeds[gate][-1].cpu_ms:.3f} ms of workers")
    return [_row(gate, workers, speeds[gate], speeds["score"]) for gate in _GATES]


def _row(gate: str, workers: int, speeds: Sequence[Speed], scores: Sequence[Speed]) -> Row:
    pairs = list(zip(speeds, scores, strict=True))
    return {
        "gate": gate,
        "workers": workers,
        "traces_per_s": median(speed.per_s for speed in speeds),
        "rate_of_score": median(speed.per_s / score.per_s for speed, score in pairs),
        "cpu_ms": median(speed.cpu_ms for speed in speeds),
        "cpu_of_score": median(speed.cpu_ms / score.cpu_ms for speed, score in pairs),
        "redis_cpu_ms": median(speed.deciding.cpu_ms for speed in speeds),
        "redis_of_score": median(speed.deciding.cpu_ms / score.deciding.cpu_ms for speed, score in pairs),
    }


def _decide(bench: Bench, portion: Sequence[ReasoningTrace]) -> Speed:
    return bench.decide(as_new(portion))


def _mixed(count: int, domains: Sequence[str]) -> list[ReasoningTrace]:
    """Return traces with real texts, whose repeats add nothing, and among them some that are like no other."""
    texts = [_in(trace, domain) for trace, domain in islice(zip(cycle(typical()), cycle(domains), strict=False), count)]
    for place, trace in zip(range(0, count, _UNLIKE), _unlike(count // _UNLIKE, domains), strict=True):
        texts[place] = trace
    return texts


def _unlike(count: int, domains: Sequence[str]) -> list[ReasoningTrace]:
    """Return successful traces whose words occur in no other trace."""
    succeeded = [trace for trace in typical() if trace.metadata.success]
    bases = islice(zip(cycle(succeeded), cycle(domains), strict=False), count)
    return [cut(asking(_in(trace, domain), " ".join(uuid4().hex for _ in range(_WORDS))), 0) for trace, domain in bases]


def _in(trace: ReasoningTrace, domain: str) -> ReasoningTrace:
    return trace.model_copy(update={"metadata": trace.metadata.model_copy(update={"task_domain": domain})})


if __name__ == "__main__":
    main()
