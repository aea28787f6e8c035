"""The documents' examples in Node work unchanged against real workers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kp_scorer.decision import Decision
from kp_scorer.settings import Settings

from tests.support import node
from tests.support.arena import BrokerName
from tests.support.commands import up
from tests.support.http_server import open_server
from tests.support.processes import PATIENCE_S, at_work
from tests.support.rabbitmq import default_queues
from tests.support.required import required
from tests.support.traces import fresh_samples, jsonl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder with the examples and their packages."""
    required("node", "nodejs")
    required("npm")
    return node.installed()


@pytest.fixture
def on_rabbitmq(rabbitmq_url: str, settings: Settings) -> Iterator[Settings]:
    with default_queues(rabbitmq_url, settings.redis.url) as named:
        yield named


def test_the_first_example_submits_to_a_fresh_service_and_reads_its_decision(folder: Path) -> None:
    with up(KP_EMBEDDING_EMBEDDER="none"):
        # The example submits before any worker is ready.
        decision = Decision.model_validate_json(node.run(folder, "submit.mts"))
    assert (decision.domain, decision.novelty.source) == ("code", "no_embedder")


def test_queues_carry_traces_and_decisions(
    broker: BrokerName, folder: Path, settings: Settings, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    used = settings if broker == "redis" else request.getfixturevalue("on_rabbitmq")
    samples = fresh_samples(7)
    plain, called, broken = samples[:3], samples[3:6], samples[6]
    variables = {"KP_BROKER_URL": used.broker.url, "KP_REDIS_URL": used.redis.url}
    with at_work(used, tmp_path) as (_, client):
        sent = jsonl(*plain, {**broken, "steps": []})
        node.run(folder, f"submit-{broker}.mjs", stdin=sent, variables=variables)
        node.run(folder, "submit-celery.mjs", stdin=jsonl(*called), variables=variables)
        ids = [str(trace["id"]) for trace in [*plain, *called]]
        decided = {status.trace_id: status.decision for status in client.as_completed(ids, timeout_s=PATIENCE_S)}
        printed = node.run(folder, f"decisions-{broker}.mjs", "6", variables=variables)
        # The record of the invalid trace tells why it is dead.
        (status,) = client.as_completed([str(broken["id"])], timeout_s=PATIENCE_S)
    assert (status.state, status.reason) == ("dead", "invalid")
    received = {decision.trace_id: decision for decision in map(Decision.model_validate_json, printed.splitlines())}
    assert received == decided
    assert received.keys() == set(ids)


def test_an_exporter_of_opentelemetry_is_pointed_at_the_server(folder: Path, settings: Settings, tmp_path: Path) -> None:
    with at_work(settings, tmp_path), open_server(settings, tmp_path / "server.log") as server:
        status = json.loads(node.run(folder, "agent.mts", variables={"KP_SERVER": server.url}))
    assert (status["decision"]["domain"], status["decision"]["agent_id"]) == ("code", "tide-agent")
