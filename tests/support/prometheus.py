"""A Prometheus that reads workers' metrics, and what it answers."""

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest

from tests.support.metrics import exposition
from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.processes import wait_until

RULES: Final = REPOSITORY / "deploy" / "prometheus"
DASHBOARD: Final = REPOSITORY / "deploy" / "grafana" / "kp-scorer.json"


def program(name: str) -> str:
    """Where a program of Prometheus is; skips the test where there is none, and fails it under CI, which installs them."""
    found = shutil.which(name)
    if not found:
        assert "CI" not in os.environ, f"there is no {name} on the PATH"
        pytest.skip(f"there is no {name} on the PATH: install Debian's package prometheus")
    return found


@contextmanager
def running_prometheus(directory: Path, ports: Sequence[int], every_s: int = 1) -> Iterator[str]:
    """Run a Prometheus that scrapes these ports every so many seconds, and has our rules; give its URL."""
    listens = f"127.0.0.1:{free_port()}"
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    configuration = {
        "global": {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"},
        "rule_files": [str(RULES / "alerts.yml")],
        "scrape_configs": [{"job_name": "kp-scorer", "static_configs": targets}],
    }
    # Prometheus' files are YAML, of which JSON is a part.
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(configuration), "utf-8")
    paths = [f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program("prometheus"), *paths, f"--web.listen-address={listens}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: _answers(f"http://{listens}/-/ready"), timeout_s=30)
        yield f"http://{listens}"
    finally:
        process.terminate()
        process.wait(20)


def values_of(url: str, query: str) -> list[str]:
    """The values that a query gives now."""
    return [str(each["value"][1]) for each in asked(url, "query", query=query)]


def asked(url: str, path: str, **parameters: Any) -> list[dict[str, Any]]:
    """The series that an answer of Prometheus' API holds."""
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urlencode(parameters)}", timeout=10) as reply:
        found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return found


def _answers(url: str) -> bool:
    try:
        exposition(url)
    except OSError:
        return False
    return True
