"""``kp-scorer status`` and ``stats``: what became of traces, one by one and all together."""

import sys

import click

from worker.broker import make_celery, results_queue, submission_queues
from worker.cli.options import settings_options
from worker.cli.output import print_json, print_status
from worker.client import Client
from worker.embedded import with_endpoints
from worker.keys import Keys
from worker.ledger import RedisLedger
from worker.publishing import waiting
from worker.redis_client import connect
from worker.settings import Settings


@click.command(epilog="Example: kp-scorer status kp:trace:4f1c…")
@click.argument("trace_ids", metavar="ID...", nargs=-1, required=True)
@settings_options
def status(trace_ids: tuple[str, ...], settings: Settings) -> None:
    """Print what is known of traces, a JSON line each: pending, decided with the decision, dead with the reason, or unknown.

    Exits with 0 only if all are decided.
    """
    with Client(with_endpoints(settings)) as client:
        found = client.look_up(trace_ids)
    for trace_id, known in zip(trace_ids, found, strict=True):
        if known:
            print_status(known)
        else:
            print_json({"trace_id": trace_id, "state": "unknown"})
    if not all(known and known.state == "decided" for known in found):
        sys.exit(1)


@click.command(epilog="Example: kp-scorer stats")
@settings_options
def stats(settings: Settings) -> None:
    """Print one JSON line: how many submissions there were and what became of them, and what the queues hold.

    Always submitted = pending + decided + dead. What another producer puts on the queue counts once a worker has taken it.
    """
    settings = with_endpoints(settings)
    with connect(settings.redis) as client:
        counts = RedisLedger(client, Keys(settings.redis.prefix), settings.ledger.ttl_ms).counts()
    queues = [submission_queues(settings)[-1], results_queue(settings, "accepted"), results_queue(settings, "rejected")]
    with make_celery(settings) as app:
        print_json({**counts._asdict(), "waiting": {queue.name: waiting(app, queue) for queue in queues}})
