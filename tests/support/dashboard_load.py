"""What the dashboard's queries give while two real workers have an uneven load, a killed worker and lost messages among it."""

import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import redis
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store.local_redis import embedded_redis

from tests.support.fleet import Fleet
from tests.support.paths import REFERENCE_TRACES
from tests.support.ports import free_port
from tests.support.processes import KP_SCORER_WORKER, wait_until
from tests.support.prometheus import DASHBOARD, asked, running_prometheus
from tests.support.traces import new_id

MINUTES: Final = 6
EVERY_S: Final = 5
"""How often Prometheus scrapes."""
_RATE_INTERVAL: Final = f"{4 * EVERY_S}s"
"""What Grafana makes of ``$__rate_interval`` where scrapes are as close as points."""
_BURST: Final = 40
_SHORT: Final = 4_000
_MEMORY: Final = 32 << 20
"""Bytes that Redis may take."""
_CHANGED: Final = {
    "scoring.threshold": 0.55,
    "scoring.review": 0.5,
    "broker.visibility_timeout_s": 10,
    "ledger.resend_after_s": 40.0,
    "embedding.threads": 1,
}


def gathered() -> dict[str, Any]:
    """Run the load; return when it began and ended, and for each query the series that it gave."""
    with tempfile.TemporaryDirectory(prefix="kp-scorer-dashboard-") as name:
        directory = Path(name)
        with embedded_redis(directory / "redis") as url:
            settings = load_settings({"broker.url": url, "redis.url": url, **_CHANGED})
            ports = [free_port(), free_port()]
            with (
                Fleet(
                    settings,
                    directory / "logs",
                    len(ports),
                    KP_SCORER_WORKER,
                    lambda place, life: {"KP_METRICS_PORT": str(ports[place])},
                    supervised=True,
                ) as fleet,
                running_prometheus(directory, ports, EVERY_S) as prometheus,
            ):
                # The first converts the model.
                wait_until(lambda: fleet.logged("worker_ready") == len(ports), timeout_s=300)
                begun = time.time()
                _run_load(settings, fleet, begun)
                return {"begun": begun, "ended": time.time(), "series": _series(prometheus, begun)}


def _run_load(settings: Settings, fleet: Fleet, begun: float) -> None:
    """Submit, read decisions, and once kill a worker and lose messages, until the time is over."""
    traces, shuffle, bursts = _traces(), random.Random(1), [0.15, 0.4, 0.65]
    nowhere = settings.model_copy(update={"queues": settings.queues.model_copy(update={"traces": "traces.nowhere"})})
    with Client(settings) as client, Client(nowhere) as astray, redis.Redis.from_url(settings.broker.url) as broker:
        broker.config_set("maxmemory", _MEMORY)
        while (passed := (time.time() - begun) / (60 * MINUTES)) < 1:
            # Two waves, and three bursts; with the second some messages are lost, with the last a worker is.
            count = round(1 - math.cos(4 * math.pi * passed + 2) + shuffle.random() / 2)
            if bursts and passed > bursts[0]:
                bursts.pop(0)
                count += _BURST
                if len(bursts) == 1:
                    astray.submit_many([next(traces) for _ in range(5)])
                elif not bursts:
                    fleet.kill(0)
            client.submit_many([next(traces) for _ in range(count)])
            if shuffle.random() < 0.05:
                broker.lpush(settings.queues.traces, '{"@type": "ReasoningTrace"}')
            if shuffle.random() < 0.02:
                broker.lpush(settings.queues.traces, "no JSON")
            # One reader keeps up; the other comes once in a while.
            broker.rpop(settings.queues.accepted, 100)
            if shuffle.random() < 0.02:
                broker.rpop(settings.queues.rejected, 10_000)
            time.sleep(1)


def _traces() -> Iterator[dict[str, Any]]:
    """The shorter ones of the real traces over and over, under new ids: what comes again is a repeat."""
    lines = (REFERENCE_TRACES / "traces.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines if len(line) < _SHORT]
    shuffle = random.Random(2)
    while True:
        shuffle.shuffle(rows)
        yield from (row | {"id": new_id()} for row in rows)


def _series(prometheus: str, begun: float) -> dict[str, list[dict[str, Any]]]:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    queries = {target["expr"] for panel in panels for target in panel["targets"]}
    between: dict[str, Any] = {"start": begun, "end": time.time(), "step": EVERY_S}
    return {
        query: asked(prometheus, "query_range", query=query.replace("$__rate_interval", _RATE_INTERVAL), **between)
        for query in sorted(queries)
    }
