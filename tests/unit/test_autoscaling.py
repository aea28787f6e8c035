"""The shipped autoscaling keeps up with varying loads in a simulation of Kubernetes' autoscaler, second by second.

The simulation takes its figures from the overlays. Every 15 s the autoscaler computes the number of replicas that each trigger
asks for, ignores those within a tenth of the present number, and takes the largest. It scales up at once, and down to the
largest number of the stabilization window; a policy limits each step. The utilization that it sees is half a minute old.
"""

import math
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.rendering import kubernetes

RATE: Final = 28.0
"""The number of traces per second that a worker decides on two slow cores."""
IN_FLIGHT: Final = 96
"""The number of traces that a worker holds (``worker.concurrency``); they no longer wait on the queue."""
STARTS_S: Final = 25
SYNC_S: Final = 15
TOLERANCE: Final = 0.1
HOUR: Final = 3_600

Loads = NDArray[np.float64]


class Scaling(NamedTuple):
    """The figures by which an overlay scales its workers."""

    least: int
    most: int
    utilization: float
    waiting: int
    up: int
    window_s: int
    down: int
    down_s: int

    @classmethod
    def of(cls, overlay: str) -> "Scaling":
        (spec,) = (each["spec"] for each in kubernetes(overlay) if each["kind"] == "ScaledObject")
        cpu, *queues = (each["metadata"] for each in spec["triggers"])
        # Messages move from the intake to the queue of traces several times a second, so that one of the two has nearly all.
        # One queue with the triggers' common figure is therefore enough for the simulation.
        (waiting,) = {int(queue.get("listLength") or queue["value"]) for queue in queues}
        behavior: dict[str, Any] = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        (up,), (down,) = (behavior[direction]["policies"] for direction in ("scaleUp", "scaleDown"))
        # With equal periods, the replicas that the autoscaler added in its last round do not count against the policy.
        assert up["periodSeconds"] == SYNC_S
        figures = up["value"], behavior["scaleDown"]["stabilizationWindowSeconds"], down["value"], down["periodSeconds"]
        return cls(spec["minReplicaCount"], spec["maxReplicaCount"], int(cpu["value"]) / 100, waiting, *figures)


class Outcome(NamedTuple):
    replicas: Loads
    waits_p95_s: float


def simulate(scaling: Scaling, arrivals: Loads) -> Outcome:
    """Return the number of replicas at each second, and the 95th percentile of the time until traces are decided."""
    replicas = ready = scaling.least
    starting: list[int] = []
    wanted: list[tuple[int, int]] = []
    removed: list[tuple[int, int]] = []
    arrived = np.cumsum(arrivals)
    decided, busy, history = (np.zeros(len(arrivals)) for _ in range(3))
    done = 0.0
    for now in range(len(arrivals)):
        ready += starting.count(now)
        starting = [at for at in starting if at > now]
        served = min(arrived[now] - done, ready * RATE)
        done += served
        decided[now], busy[now], history[now] = done, served / (ready * RATE), replicas
        if now < 2 * SYNC_S or now % SYNC_S:
            continue
        by_cores = busy[now - 2 * SYNC_S : now - SYNC_S].mean() / scaling.utilization * ready
        by_queue = max(0.0, arrived[now] - done - IN_FLIGHT * ready) / scaling.waiting
        asked = [replicas if abs(each / replicas - 1) <= TOLERANCE else math.ceil(each) for each in (by_cores, by_queue)]
        wanted.append((now, min(scaling.most, max(scaling.least, *asked))))
        target = wanted[-1][1]
        if target > replicas:
            target = min(target, replicas + scaling.up)
            starting += [now + STARTS_S] * (target - replicas)
        elif target < replicas:
            lately = sum(count for at, count in removed if now - at < scaling.down_s)
            highest = max(count for at, count in wanted if now - at <= scaling.window_s)
            target = min(replicas, max(highest, replicas - scaling.down + lately))
            removed.append((now, replicas - target))
            ready = min(ready, target)
            starting = starting[: target - ready]
        replicas = target
    waits = np.searchsorted(decided, arrived - 1e-6) - np.arange(len(arrivals))
    order = np.argsort(waits)
    share = np.cumsum(arrivals[order])
    return Outcome(history, float(waits[order][np.searchsorted(share, 0.95 * share[-1])]))


def bursts(peak: float) -> Loads:
    """Return a load with ``peak`` traces a second for five minutes of each hour.

    Each burst begins just after the autoscaler has looked, so that it notices 15 s late.
    """
    rates = np.full(4 * HOUR, 77.0)
    for start in range(HOUR // 2, len(rates), HOUR):
        rates[start : start + 300] = peak
    return rates


LOADS: Final = {
    "constant": np.full(2 * HOUR, 77.0),
    "a day": 77 + 60 * np.sin(np.linspace(0, 2 * np.pi, 24 * HOUR)),
    "bursts of twice as much": bursts(154.0),
    "bursts of four times as much": bursts(300.0),
    "a peak of 300": np.repeat([77.0, 300.0, 77.0], HOUR),
}
MOST_WORKERS: Final = {"bursts of four times as much": 1.5}
"""The most workers as a multiple of those needed, by default 1.3.

A growing queue starts more workers than are needed once it is empty.
"""


def needed(rates: Loads) -> float:
    """Return the mean number of workers that keep up with a load, rounded up at each second, as no part of a worker can run."""
    return float(np.ceil(rates / RATE).mean())


@pytest.mark.parametrize("load", LOADS)
def test_workers_are_few_more_than_needed_and_traces_wait_less_than_five_seconds(load: str) -> None:
    outcome = simulate(Scaling.of("redis"), np.random.default_rng(1).poisson(LOADS[load]).astype(float))
    assert outcome.replicas.mean() < MOST_WORKERS.get(load, 1.3) * needed(LOADS[load])
    assert outcome.waits_p95_s < 5


@pytest.mark.parametrize("overlay", ["rabbitmq", "divided/code", "divided/rest"])
def test_all_overlays_scale_alike(overlay: str) -> None:
    assert Scaling.of(overlay) == Scaling.of("redis")
