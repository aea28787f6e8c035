"""Measures how long the traces of one queue wait while another, of equal weight, has a backlog of ``--backlog`` traces.

One worker that counts words decides them, first without the backlog and then with it. ``KP_BROKER_URL`` may name a RabbitMQ.

- ``burst_s``: the time until ``--burst`` traces that come at once are decided.
- ``of_share``: the number of traces that the worker decides from the first to the last of the burst, divided by twice the
  burst, which it would decide if the burst got its share of one half. Above 1, the burst waits longer than it should.
- ``p50_ms``, ``p95_ms``: the time from submission to the decision in the ledger, for traces that come one by one.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import send_traces
from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.wire import as_bytes
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings

from tests.benchmarks.common import Row, arguments, report
from tests.support.processes import KP_SCORER_WORKER, Worker, start_worker
from tests.support.rabbitmq import declare_as_worker
from tests.support.servers import embedded_default
from tests.support.traces import new_id, sample_traces

_SINGLE = 40
_SENT_AT_ONCE = 1_000


def main() -> None:
    report("fairness", rows_of(arguments(__doc__, backlog=100_000, burst=1_000).parse_args()))


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, embedded_default(Path(folder)) as url:
        urls = {"redis.url": url, "broker.url": os.environ.get("KP_BROKER_URL", url), "embedding.embedder": "words"}
        settings = load_settings({**urls, "queues.traces": {"traces.busy": {}, "traces.quiet": {}}, "results.publish": []})
        declare_as_worker(settings)
        with (
            start_worker(settings, Path(folder) / "log", command=KP_SCORER_WORKER) as worker,
            Client(settings, queue="traces.quiet") as client,
        ):
            for backlog in (0, options.backlog):
                _send(settings, backlog)
                yield {"backlog": backlog, **_burst(client, worker, options.burst), **_single_ms(client)}


def _traces(count: int) -> list[dict[str, Any]]:
    samples = sample_traces()
    return [samples[number % len(samples)] | {"id": new_id()} for number in range(count)]


def _send(settings: Settings, count: int) -> None:
    with make_celery(settings) as app:
        for first in range(0, count, _SENT_AT_ONCE):
            portion = _traces(min(_SENT_AT_ONCE, count - first))
            queues = submission_queues(settings.broker, settings.queues)["traces.busy"]
            send_traces(app, queues, [(each["id"], as_bytes(each)) for each in portion])


def _burst(client: Client, worker: Worker, count: int) -> Row:
    traces, started = _traces(count), time.monotonic()
    trace_ids = {str(each) for each in client.submit_many(traces)}
    assert len(list(client.as_completed(trace_ids, timeout_s=3_600))) == count
    burst_s, order = time.monotonic() - started, [event["trace_id"] for event in worker.events("trace_decided")]
    places = [place for place, trace_id in enumerate(order) if trace_id in trace_ids]
    return {"burst_s": burst_s, "of_share": (places[-1] - places[0] + 1) / (2 * count)}


def _single_ms(client: Client) -> Row:
    took_ms = []
    for trace in _traces(_SINGLE):
        started = time.monotonic()
        client.wait(client.submit(trace), timeout_s=600)
        took_ms.append((time.monotonic() - started) * 1_000)
    cuts = quantiles(took_ms, n=20, method="inclusive")
    return {"p50_ms": cuts[9], "p95_ms": cuts[18]}


if __name__ == "__main__":
    main()
