"""Metrics as a worker shows them."""

import urllib.request
from typing import Final

from kp_scorer.settings import Settings
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[str, float]
"""Values by name and labels: ``kp_scorer_decisions_total{domain="code",outcome="accepted"}``; labels in order."""

_TIMEOUT_S: Final = 10.0


def scraped(settings: Settings) -> Samples:
    """What the worker with these settings shows now."""
    return samples_of(exposition(f"http://{settings.metrics.host}:{settings.metrics.port}/metrics"))


def exposition(url: str) -> str:
    """What is shown at a URL."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
        return str(reply.read().decode())


def samples_of(shown: str) -> Samples:
    """The samples of an exposition."""
    return {
        sample.name + (f"{{{labels}}}" if (labels := _shown(sample.labels)) else ""): sample.value
        for family in families_of(shown)
        for sample in family.samples
    }


def families_of(shown: str) -> list[Metric]:
    """The metrics of an exposition."""
    return list(text_string_to_metric_families(shown))


def _shown(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
