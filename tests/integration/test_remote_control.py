"""By default whoever reaches the broker can neither ask a worker nor change it; by a setting Celery's remote control does."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kp_scorer.client import Client
from kp_scorer.errors import SettingsError
from kp_scorer.settings import Settings, load_settings

from tests.support.changed_settings import SettingsWith
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.rabbitmq import RabbitMQ
from tests.support.traces import fresh_samples


def asked(settings: Settings, command: str, timeout_s: float = 10.0, **arguments: Any) -> list[Any]:
    """The answers that an application of somebody else gets to a command."""
    with closing(Celery("another-application", broker=settings.broker.url, set_as_current=False)) as app:
        return list(app.control.broadcast(command, arguments=arguments, reply=True, limit=1, timeout=timeout_s) or [])


def test_a_worker_has_no_mailbox_by_default(on_broker: SettingsWith, redis_client: redis.Redis, tmp_path: Path) -> None:
    settings = on_broker()
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker:
        if settings.broker.is_redis:
            assert redis_client.pubsub_numpat() == 0
            assert list(redis_client.scan_iter("*kombu*")) + list(redis_client.scan_iter("*pidbox*")) == []
        assert asked(settings, "shutdown", timeout_s=2.0) == []
        with Client(settings) as client:
            client.wait(client.submit(fresh_samples(1)[0]), timeout_s=30)
        assert worker.process.poll() is None


def test_a_setting_has_celery_obey_on_rabbitmq(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    settings = rabbitmq.settings(worker__remote_control=True)
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker:
        (answer,) = wait_until(lambda: asked(settings, "active_queues"))
        assert [queue["name"] for queues in answer.values() for queue in queues] == [settings.queues.traces]
        with Client(settings) as client:
            client.wait(client.submit(fresh_samples(1)[0]), timeout_s=30)
        asked(settings, "shutdown", timeout_s=1.0)
        assert worker.process.wait(30) == 0


@pytest.mark.parametrize("url", ["", "redis://127.0.0.1/0"])
def test_remote_control_is_refused_where_redis_is_the_broker(url: str) -> None:
    with pytest.raises(SettingsError, match=r"worker\.remote_control needs RabbitMQ"):
        load_settings({"broker.url": url, "worker.remote_control": True})
