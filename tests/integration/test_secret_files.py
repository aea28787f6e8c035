"""Workers that find their URLs in files, as secrets are mounted in containers."""

from pathlib import Path

import pytest
from kp_scorer.client import Client
from kp_scorer.settings import Settings

from tests.support.processes import KP_SCORER_WORKER, start_worker
from tests.support.traces import fresh_samples

CELERY = ("celery", "-A", "kp_scorer.app", "worker")


@pytest.mark.parametrize("command", [KP_SCORER_WORKER, CELERY], ids=["kp-scorer", "celery"])
def test_a_worker_reads_its_urls_from_files(command: tuple[str, ...], settings: Settings, tmp_path: Path) -> None:
    files = {f"KP_{section}_URL_FILE": tmp_path / section for section in ("BROKER", "REDIS")}
    for file in files.values():
        file.write_text(f"{settings.broker.url}\n", "utf-8")
    unnamed = Settings.model_validate({"embedding": {"embedder": "none"}})
    (trace,) = fresh_samples(1)
    variables = {name: str(file) for name, file in files.items()}
    with (
        start_worker(unnamed, tmp_path / "worker.log", command=command, variables=variables),
        Client(settings) as client,
    ):
        assert client.wait(client.submit(trace), timeout_s=30).trace_id == trace["id"]
