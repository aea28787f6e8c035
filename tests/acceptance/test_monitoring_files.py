"""The dashboard and the alert rules name only metrics that a worker shows; Prometheus reads those of two workers at once."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
from kp_scorer.broker.backlog import Backlog
from kp_scorer.process.metrics import WorkerCollector
from kp_scorer.process.metrics_server import metrics_server
from kp_scorer.process.observer import Observer
from kp_scorer.process.reporting import Condition
from kp_scorer.settings import MetricsSettings, Settings

from tests.support.metrics import exposition, samples_of
from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.processes import FAST_WORKER, start_worker, wait_until

DASHBOARD: Final = REPOSITORY / "deploy" / "grafana" / "kp-scorer.json"
RULES: Final = REPOSITORY / "deploy" / "prometheus"
METRIC: Final = re.compile(r"\b(?:kp_scorer|process)_\w+")


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """The names of all that a worker shows."""
    backlog = Backlog({"traces": 0}, {"decisions.accepted": 0}, (), 0, 0.0)
    condition = Condition((), 0, {}, 0, 0.0, backlog, 0.0)
    settings = MetricsSettings(port=free_port())
    with metrics_server(settings, WorkerCollector(Observer(()).figures, lambda: condition)):
        found = samples_of(exposition(f"http://127.0.0.1:{settings.port}/metrics"))
    return {name.partition("{")[0] for name in found}


def test_the_dashboard_names_only_metrics_that_there_are(shown: set[str]) -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    named = set(METRIC.findall(" ".join(asked)))
    assert named - shown == set()
    # What nobody looks at need not be shown.
    assert {name for name in shown if name.startswith("kp_scorer_") and _is_unseen(name, named)} == set()


def _is_unseen(name: str, named: set[str]) -> bool:
    """Whether a metric, or the histogram that a sample belongs to, is named nowhere."""
    whole = re.sub(r"_(bucket|sum|count)$", "", name)
    return not any(each.startswith(whole) for each in named) and not name.endswith("_age_seconds")


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_rules_name_only_metrics_that_there_are(shown: set[str]) -> None:
    text = (RULES / "alerts.yml").read_text("utf-8")
    assert set(METRIC.findall(text)) - shown == set()
    tested = (RULES / "alerts_test.yml").read_text("utf-8")
    assert set(re.findall(r"alert: (\w+)", text)) == set(re.findall(r"alertname: (\w+)", tested))


def test_the_rules_alert_as_their_tests_say() -> None:
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run([_program("promtool"), *arguments], cwd=RULES, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    asked = [target["expr"].replace("$__rate_interval", "5m") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(asked)]
    # Prometheus' files are YAML, of which JSON is a part.
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}), "utf-8")
    done = subprocess.run([_program("promtool"), "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_one_and_finds_the_rules() -> None:
    file = RULES / "prometheus.yml"
    done = subprocess.run([_program("promtool"), "check", "config", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_prometheus_reads_two_workers(settings: Settings, tmp_path: Path) -> None:
    executable = _program("prometheus")
    one, two = (
        settings.model_copy(update={"metrics": settings.metrics.model_copy(update={"port": free_port()})}) for _ in range(2)
    )
    with (
        start_worker(one, tmp_path / "one.log", command=FAST_WORKER),
        start_worker(two, tmp_path / "two.log", command=FAST_WORKER),
        _prometheus(executable, tmp_path, [one.metrics.port, two.metrics.port]) as url,
    ):
        wait_until(lambda: _asked(url, "sum(kp_scorer_ready)") == ["2"], timeout_s=30)
        assert _asked(url, "count(kp_scorer_info{engine='python'})") == ["2"]
        assert _asked(url, "scrape_samples_scraped < 100") == []


def _program(name: str) -> str:
    found = shutil.which(name)
    if not found:
        pytest.skip(f"there is no {name} on the PATH: install Debian's package prometheus")
    return found


@contextmanager
def _prometheus(executable: str, directory: Path, ports: list[int]) -> Iterator[str]:
    """Run a Prometheus that scrapes these ports once a second, and has our rules; give its URL."""
    listens = f"127.0.0.1:{free_port()}"
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES / "alerts.yml")],
        "scrape_configs": [{"job_name": "kp-scorer", "static_configs": targets}],
    }
    file = directory / "prometheus.yml"
    file.write_text(json.dumps(configuration), "utf-8")
    paths = [f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([executable, *paths, f"--web.listen-address={listens}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: _answers(f"http://{listens}/-/ready"), timeout_s=30)
        yield f"http://{listens}"
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        exposition(url)
    except OSError:
        return False
    return True


def _asked(url: str, query: str) -> list[str]:
    """The values that a query gives now."""
    with urllib.request.urlopen(f"{url}/api/v1/query?query={quote(query)}", timeout=10) as reply:
        found: Any = json.load(reply)
    return [each["value"][1] for each in found["data"]["result"]]
