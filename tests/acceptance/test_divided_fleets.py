"""Two fleets beside each other, with the settings of the overlay that divides them, and the example that submits to both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kp_scorer.client import Client
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings, load_settings

from tests.support.outcomes import only_log, published
from tests.support.processes import FAST_WORKER, start_worker
from tests.support.rendering import DEPLOY, kubernetes
from tests.support.traces import fresh_samples


def test_each_fleet_decides_the_traces_of_its_domains_and_knows_no_others(settings: Settings, tmp_path: Path) -> None:
    fleets = [_with_variables(settings, each["data"]) for each in kubernetes("divided") if each["kind"] == "ConfigMap"]
    of_code, of_others = sorted(fleets, key=lambda fleet: fleet.queues.traces != "traces.code")
    traces = fresh_samples(12)
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(json.dumps(trace) + "\n" for trace in traces), "utf-8")
    ids_of_code = {trace["id"] for trace in traces if trace["metadata"]["task_domain"] == "code"}
    ids_of_others = {trace["id"] for trace in traces} - ids_of_code
    assert ids_of_code
    assert ids_of_others
    with (
        start_worker(of_code, tmp_path / "code.log", command=FAST_WORKER),
        start_worker(of_others, tmp_path / "others.log", command=FAST_WORKER),
        Client(of_code) as code,
        Client(of_others) as others,
    ):
        example = [sys.executable, str(DEPLOY / "examples" / "submit_by_domain.py"), str(file)]
        subprocess.run(
            example,
            env=os.environ | {"KP_BROKER_URL": settings.broker.url, "KP_REDIS_URL": settings.redis.url},
            check=True,
            timeout=60,
        )
        assert {each.trace_id for each in code.as_completed(ids_of_code, timeout_s=60)} == ids_of_code
        assert {each.trace_id for each in others.as_completed(ids_of_others, timeout_s=60)} == ids_of_others
        assert code.look_up(sorted(ids_of_others)) == [None] * len(ids_of_others)
        assert others.look_up(sorted(ids_of_code)) == [None] * len(ids_of_code)
    for fleet, expected in ((of_code, ids_of_code), (of_others, ids_of_others)):
        with Store.open(fleet) as store:
            assert {entry.trace_id for entry in only_log(store).entries()} == expected
        assert sorted(decision["trace_id"] for decision in published(fleet)) == sorted(expected)


def _with_variables(settings: Settings, variables: dict[str, str]) -> Settings:
    """The settings of a worker with these variables, on the test's Redis."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        return load_settings({"broker.url": settings.broker.url, "redis.url": settings.redis.url})
