"""Reads the metrics of workers, and runs a Prometheus that scrapes them."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Final
from urllib.error import HTTPError
from urllib.parse import urlencode

from kp_scorer.settings import Settings
from prometheus_client.parser import text_string_to_metric_families

from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S, free_port, wait_until
from tests.support.required import required

RULES: Final = REPOSITORY / "deploy" / "prometheus"
DASHBOARD: Final = REPOSITORY / "deploy" / "grafana" / "kp-scorer.json"


Samples = dict[str, float]
"""Values by name and sorted labels: ``kp_scorer_decisions_total{domain="code",outcome="accepted"}``."""


def scraped(settings: Settings) -> Samples:
    """Return the samples that the worker with these settings exposes now."""
    return samples_of(exposition(f"http://{settings.metrics.host}:{settings.metrics.port}/metrics"))


def program(name: str) -> str:
    """Return the path of one of Prometheus' programs."""
    return required(name, "prometheus")


@contextmanager
def running_prometheus(directory: Path, ports: Sequence[int], every_s: int = 1) -> Iterator[str]:
    """Run a Prometheus that has our rules and scrapes these ports every ``every_s`` seconds; yield its URL."""
    listens = f"127.0.0.1:{free_port()}"
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    configuration = {
        "global": {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"},
        "rule_files": [str(RULES / "alerts.yml")],
        "scrape_configs": [{"job_name": "kp-scorer", "static_configs": targets}],
    }
    # Prometheus reads YAML, of which JSON is a subset.
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(configuration), "utf-8")
    paths = [f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program("prometheus"), *paths, f"--web.listen-address={listens}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: _answers(f"http://{listens}/-/ready"))
        yield f"http://{listens}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def values_of(url: str, query: str) -> list[str]:
    series = json.loads(exposition(f"{url}/api/v1/query?{urlencode({'query': query})}"))["data"]["result"]
    return [str(each["value"][1]) for each in series]


def _answers(url: str) -> bool:
    try:
        exposition(url)
    except HTTPError as error:
        # The error holds the connection open.
        error.close()
        return False
    except OSError:
        return False
    return True


def exposition(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


def samples_of(text: str) -> Samples:
    samples = {}
    for sample in chain.from_iterable(family.samples for family in text_string_to_metric_families(text)):
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
        samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples
