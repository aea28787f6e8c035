"""With any number in the settings as large as it may be, a worker starts, or names the one that it cannot use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from annotated_types import Le
from kp_scorer.errors import SettingsError
from kp_scorer.settings import Settings

from tests.support.changed_settings import with_changed
from tests.support.processes import FAST_WORKER, PATIENCE_S, at_work, launch_worker
from tests.support.rabbitmq import RabbitMQ
from tests.support.traces import fresh_samples

PORTS: Final = {"metrics__port", "serve__port"}


def largest() -> Iterator[tuple[str, Any]]:
    """Yield each number of the settings with the largest value that it may have."""
    for section, values in Settings():
        for name, field in type(values).model_fields.items():
            for each in field.metadata:
                if isinstance(each, Le) and f"{section}__{name}" not in PORTS:
                    yield f"{section}__{name}", each.le


def test_a_window_beyond_all_memory_is_refused_by_name(settings: Settings, tmp_path: Path) -> None:
    worker = launch_worker(with_changed(settings, novelty__max_elements=10**15), tmp_path / "worker.log", FAST_WORKER)
    assert worker.process.wait(PATIENCE_S) == SettingsError.exit_code
    (event,) = worker.events("worker_cannot_start")
    assert event["detail"].startswith("novelty.max_elements: there is no memory")


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_a_worker_decides_with_every_other_number_at_its_largest(
    broker: str, settings: Settings, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if broker == "rabbitmq":
        rabbitmq: RabbitMQ = request.getfixturevalue("rabbitmq")
        settings = rabbitmq.settings()
    numbers = dict(largest())
    assert len(numbers) > 15
    numbers |= {"novelty__max_elements": 1_000, "worker__grace_s": 25.0, "scoring__threshold": 0.75}
    with at_work(with_changed(settings, **numbers), tmp_path) as (_, client):
        trace_id = client.submit(fresh_samples(1)[0])
        assert client.wait(trace_id, 30).trace_id == trace_id
