"""With ``results.nearest`` off, a producer that probes for similar traces learns no other producer's trace id, on any path."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from click.testing import CliRunner
from kombu import Queue
from kp_scorer.cli.main import commands
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store.keys import Keys

from tests.support.processes import PATIENCE_S, SMALL_WORKER, start_worker, wait_until
from tests.support.servers import redis_servers
from tests.support.shipped import Shipped
from tests.support.traces import new_id, short_traces


@pytest.mark.usefixtures("as_operator")
@pytest.mark.parametrize("shipped_redis", redis_servers()[:1], indirect=True)
@pytest.mark.parametrize("via", ["queue", "stream"])
def test_only_operators_learn_which_trace_is_nearest(
    via: str, settings: Settings, shipped_redis: Shipped, client: Client, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    ways = {"results.via": via, "results.nearest": False}
    settings = load_settings({"broker.url": settings.broker.url, "redis.url": settings.redis.url, **ways})
    (victim,) = short_traces(1, seed=51)
    probe, asked = victim | {"id": new_id()}, victim | {"id": new_id()}
    of_client = shipped_redis.url("client")
    asking = Celery("asking", broker=of_client, backend=of_client, set_as_current=False)
    with start_worker(settings, tmp_path / "worker.log", command=SMALL_WORKER):
        client.wait(client.submit(victim), timeout_s=PATIENCE_S)
        decision = client.wait(client.submit(probe), timeout_s=PATIENCE_S)
        task = asking.send_task(
            "score_trace", args=[asked], queue=Queue(settings.queues.first, no_declare=True), ignore_result=False
        )
        learnt = [decision.model_dump_json(), str(task.get(timeout=30)), str(redis_client.hgetall(keys.record(probe["id"])))]
        learnt += wait_until(lambda: _published(redis_client, settings, via))
    assert len(learnt) == 6
    assert [victim["id"] in each for each in learnt].count(True) == 1, "in its own decision"
    assert (decision.novelty.source, decision.dimensions.novelty) == ("embedding", 0)
    asking.close()
    shown = CliRunner().invoke(commands, ["explain", probe["id"]])
    assert "1 - 1.0000, the similarity to the nearest earlier trace" in shown.output
    assert f"{victim['id']}, similarity 1.0000, of the same content" in " ".join(shown.output.split())


def _published(client: Any, settings: Settings, via: str) -> list[str]:
    """Return the three decisions that readers get, or none until all are there."""
    names = settings.queues.name("accepted"), settings.queues.name("rejected")
    if via == "stream":
        published = [fields[b"decision"].decode() for name in names for _, fields in client.xrange(name)]
    else:
        items = [json.loads(item) for name in names for item in client.lrange(name, 0, -1)]
        published = [base64.b64decode(item["body"]).decode() for item in items]
    return published if len(published) == 3 else []
