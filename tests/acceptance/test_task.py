"""Decisions as calls of a task, by the app and the settings that the wire format shows."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings

from tests.support.arena import BrokerName
from tests.support.documents import code_with
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.rabbitmq import default_queues
from tests.support.traces import fresh_samples

pytestmark = pytest.mark.slow


@pytest.fixture
def default_names(broker: BrokerName, settings: Settings, request: pytest.FixtureRequest) -> Iterator[Settings]:
    """Settings with the queues' default names, where nobody else has any."""
    if broker == "redis":
        yield settings
        return
    with default_queues(request.getfixturevalue("rabbitmq_url"), settings.redis.url) as named:
        yield named


def flags(settings: Settings) -> dict[str, Any]:
    sections = tomllib.loads(code_with('task = "kept.store"'))
    named = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    return {"broker.url": settings.broker.url, "redis.url": settings.redis.url, "scoring.threshold": 0, **named}


def test_a_task_of_another_app_gets_decisions_by_the_example(default_names: Settings, tmp_path: Path) -> None:
    first, second = fresh_samples(2)
    # As it is without these settings: this worker declares decisions.accepted.
    with start_worker(default_names, tmp_path / "before.log", command=FAST_WORKER), Client(default_names) as client:
        client.wait(client.submit(first), timeout_s=30)
    (tmp_path / "kept.py").write_text(code_with('Celery("kept"'))
    settings = load_settings(flags(default_names))
    log = tmp_path / "kept.log"
    command = [sys.executable, "-m", "celery", "-A", "kept", "worker", "--pool", "solo", "--without-gossip", "--without-mingle"]
    variables = os.environ | {"KP_BROKER_URL": settings.broker.url, "PYTHONUNBUFFERED": "1"}
    with (
        start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER),
        Client(settings) as client,
        log.open("wb") as output,
        subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=subprocess.STDOUT) as kept,
    ):
        try:
            decision = client.wait(client.submit(second), timeout_s=30)
            wait_until(lambda: decision.trace_id in log.read_text() or kept.poll() is not None)
            assert kept.poll() is None, log.read_text()
        finally:
            kept.terminate()
