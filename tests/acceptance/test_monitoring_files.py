"""The dashboard and the alert rules name only metrics that a worker shows; Prometheus reads those of two workers at once."""

import json
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
import yaml
from kp_scorer.broker.backlog import Backlog
from kp_scorer.process.metrics import WorkerCollector
from kp_scorer.process.metrics_server import metrics_server
from kp_scorer.process.observer import Observer
from kp_scorer.process.reporting import Condition
from kp_scorer.settings import MetricsSettings, Settings

from tests.support.documents import anchors_of, lines_of
from tests.support.metrics import exposition, samples_of
from tests.support.ports import free_port
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.prometheus import DASHBOARD, RULES, program, running_prometheus, values_of

INCIDENTS: Final = "deploy/INCIDENTS.md"
METRIC: Final = re.compile(r"\b(?:kp_scorer|process)_\w+")


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """The names of all that a worker shows."""
    backlog = Backlog({"traces": 0}, {"decisions.accepted": 0}, (), 0, 0.0, 0.0)
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


def test_every_alert_names_the_part_of_the_document_that_names_it() -> None:
    rules = yaml.safe_load((RULES / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
    runbooks = {rule["alert"]: rule["annotations"]["runbook"] for rule in rules}
    assert {runbook.partition("#")[0] for runbook in runbooks.values()} == {INCIDENTS}
    assert {runbook.partition("#")[2] for runbook in runbooks.values()} - anchors_of(INCIDENTS) == set()
    rows = [line.text for line in lines_of(INCIDENTS) if line.text.startswith("| `KpScorer")]
    named = {row.split("`")[1]: f"{INCIDENTS}{re.findall(r'[(](#.*?)[)]', row)[0]}" for row in rows}
    assert named == runbooks


def test_the_rules_alert_as_their_tests_say() -> None:
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run([program("promtool"), *arguments], cwd=RULES, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    asked = [target["expr"].replace("$__rate_interval", "5m") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(asked)]
    # Prometheus' files are YAML, of which JSON is a part.
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}), "utf-8")
    done = subprocess.run([program("promtool"), "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_one_and_finds_the_rules() -> None:
    file = RULES / "prometheus.yml"
    done = subprocess.run([program("promtool"), "check", "config", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_prometheus_reads_two_workers(settings: Settings, tmp_path: Path) -> None:
    one, two = (
        settings.model_copy(update={"metrics": settings.metrics.model_copy(update={"port": free_port()})}) for _ in range(2)
    )
    with (
        start_worker(one, tmp_path / "one.log", command=FAST_WORKER),
        start_worker(two, tmp_path / "two.log", command=FAST_WORKER),
        running_prometheus(tmp_path, [one.metrics.port, two.metrics.port]) as url,
    ):
        wait_until(lambda: values_of(url, "sum(kp_scorer_ready)") == ["2"], timeout_s=30)
        assert values_of(url, "count(kp_scorer_info{engine='python'})") == ["2"]
        assert values_of(url, "scrape_samples_scraped < 100") == []
