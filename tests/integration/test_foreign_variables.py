"""Variables that others set: Celery's own do not count, and Kubernetes' are no misspelt settings."""

from pathlib import Path

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.client import Client
from kp_scorer.errors import SettingsError
from kp_scorer.settings import Settings, load_settings

from tests.support.processes import KP_SCORER_WORKER, start_worker
from tests.support.traces import fresh_samples

NOWHERE = "redis://:not-ours@127.0.0.1:1/0"
STRAY = {
    "CELERY_BROKER_URL": NOWHERE,
    "CELERY_BROKER_READ_URL": NOWHERE,
    "CELERY_BROKER_WRITE_URL": NOWHERE,
    "CELERY_RESULT_BACKEND": NOWHERE,
    "CELERY_CONFIG_MODULE": "no.such.module",
    "CELERY_LOADER": "no.such:Loader",
}
"""What would count for another Celery app."""

OF_THE_COMMAND = {"BROKER_URL": NOWHERE, "RESULT_BACKEND": NOWHERE, "CONFIG_MODULE": "no.such.module", "APP": "no.such.app"}
"""What the command ``celery`` reads."""

LINKS = {
    "KP_REDIS_SERVICE_HOST": "10.0.0.1",
    "KP_REDIS_SERVICE_PORT": "6379",
    "KP_REDIS_SERVICE_PORT_TLS": "6380",
    "KP_REDIS_PORT": "tcp://10.0.0.1:6379",
    "KP_REDIS_PORT_6379_TCP": "tcp://10.0.0.1:6379",
    "KP_REDIS_PORT_6379_TCP_PROTO": "tcp",
    "KP_REDIS_PORT_6379_TCP_PORT": "6379",
    "KP_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
    "KP_SCORER_SERVICE_HOST": "10.0.0.2",
    "KP_SCORER_PORT": "tcp://10.0.0.2:80",
    "KP_SERVICE_HOST": "10.0.0.3",
    "KP_PORT": "udp://10.0.0.3:53",
}
"""What Kubernetes sets where services are called kp-redis, kp-scorer and kp."""


def test_a_worker_and_its_clients_connect_where_our_settings_say(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (STRAY | LINKS).items():
        monkeypatch.setenv(name, value)
    unscored = settings.model_copy(update={"embedding": settings.embedding.model_copy(update={"embedder": "none"})})
    variables = OF_THE_COMMAND | LINKS
    with (
        start_worker(unscored, tmp_path / "worker.log", command=KP_SCORER_WORKER, variables=variables) as worker,
        Client(settings) as client,
        make_celery(settings) as app,
    ):
        (asked, submitted) = fresh_samples(2)
        assert client.wait(client.submit(submitted), timeout_s=30).trace_id == submitted["id"]
        # A producer that asks for the result gets it from where the worker keeps it.
        result = app.send_task("score_trace", args=[asked], ignore_result=False)
        assert result.get(timeout=30)["trace_id"] == asked["id"]
    (warning,) = worker.events("celery_variables_ignored")
    assert set(warning["variables"]) == STRAY.keys()
    assert "not-ours" not in worker.text()


def test_celerys_command_takes_no_options_from_variables(settings: Settings, tmp_path: Path) -> None:
    unscored = settings.model_copy(update={"embedding": settings.embedding.model_copy(update={"embedder": "none"})})
    (trace,) = fresh_samples(1)
    variables = {"CELERY_WORKER_PURGE": "1", "CELERY_WORKER_QUEUES": "other", "CELERY_WORKER_POOL": "prefork"}
    with Client(settings) as client:
        client.submit(trace)
        command = ("celery", "-A", "kp_scorer.app", "worker")
        with start_worker(unscored, tmp_path / "worker.log", command=command, variables=variables) as worker:
            assert client.wait(trace["id"], timeout_s=30)
    (warning,) = worker.events("celery_variables_ignored")
    assert set(warning["variables"]) == variables.keys()


def test_links_of_services_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KP_REDIS_PORT", "6379"),
        ("KP_REDIS_PORT", "tcp://10.0.0.1:6379"),
        ("KP_REDIS_SERVICE_HOST", "10.0.0.1"),
        ("KP_REDIS_SERVICE_PORT", "6379"),
        ("KP_REDIS_PORT_6379_TCP_ADDR", "10.0.0.1"),
        ("KP_SCORER_SERVICE_HOST", "10.0.0.2"),
    ],
)
def test_one_that_stands_alone_is_a_misspelt_setting(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match="no setting has this name"):
        load_settings()


@pytest.mark.parametrize("name", ["KP_REDIS_URLS", "KP_REDIS_PORTS", "KP_REDISS_PORT", "KP_REDIS_PORT_6379", "KP_BROKER_PORT"])
def test_a_misspelt_setting_beside_links_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for link, value in (LINKS | {name: "redis"}).items():
        monkeypatch.setenv(link, value)
    with pytest.raises(SettingsError, match="no setting has this name"):
        load_settings()
