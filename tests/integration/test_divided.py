"""Of two fleets on one Redis, set up as in ``deploy/kubernetes/divided``, each decides only the traces of its own domains."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.commands import run_in_shell
from tests.support.documents import code_with
from tests.support.outcomes import only_log, published
from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S, start_worker, wait_until
from tests.support.rendering import container_variables, overlay_settings
from tests.support.traces import fresh_samples, jsonl

FLEETS: Final = ("code", "rest")
SENT_TO_CODE: Final = ("code", "security")
"""The domains whose traces the example sends to the fleet ``code``."""


@pytest.fixture
def url(alone: tuple[Settings, redis.Redis], tmp_path: Path) -> str:
    """The URL of a Redis with the documented users of both fleets, whose passwords are all ``secret``."""
    settings, administrator = alone
    for fleet in FLEETS:
        run_in_shell(code_with("~code.").replace("code", fleet), tmp_path).check_returncode()
    for line in (tmp_path / "fleets.acl").read_text("utf-8").splitlines():
        _, user, state, password, *rules = line.split()
        assert password == f"PASSWORD-OF-{user}"
        administrator.execute_command("ACL", "SETUSER", user, state, ">secret", *rules)  # type: ignore[no-untyped-call]
    return settings.redis.url


def url_of(user: str, url: str) -> str:
    return f"redis://{user}:secret@{url.partition('@')[2]}"


@contextmanager
def workers(url: str, directory: Path) -> Iterator[None]:
    """Run a worker of each fleet, with the variables of its manifests and its own user in the files that they name."""
    with ExitStack() as running:
        for fleet in FLEETS:
            (directory / fleet).write_text(url_of(f"{fleet}-worker", url), "utf-8")
            files = dict.fromkeys(("KP_BROKER_URL_FILE", "KP_REDIS_URL_FILE"), str(directory / fleet))
            variables = container_variables(f"divided/{fleet}") | files | {"KP_EMBEDDING_EMBEDDER": "words"}
            running.enter_context(start_worker(Settings(), directory / f"{fleet}.log", variables=variables))
        yield


def route(traces: list[dict[str, Any]], url: str) -> list[str]:
    """Run the example on these traces, and return its output."""
    example = REPOSITORY / "deploy" / "examples" / "route_by_domain.py"
    done = subprocess.run(
        [sys.executable, str(example)],
        env=os.environ | {f"{fleet.upper()}_URL": url_of(f"{fleet}-client", url) for fleet in FLEETS},
        input=jsonl(*traces),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_trace_is_decided_once_by_the_fleet_of_its_domain(
    url: str, alone: tuple[Settings, redis.Redis], tmp_path: Path
) -> None:
    traces = fresh_samples(48)
    ids: dict[str, list[str]] = {fleet: [] for fleet in FLEETS}
    for trace in traces:
        ids["code" if trace["metadata"]["task_domain"] in SENT_TO_CODE else "rest"].append(trace["id"])
    settings = {fleet: overlay_settings(f"divided/{fleet}", url) for fleet in FLEETS}
    stores = {fleet: Store.open(settings[fleet]) for fleet in FLEETS}
    with workers(url, tmp_path):
        assert sorted(route(traces, url)) == sorted(f"{fleet} {trace_id}" for fleet in FLEETS for trace_id in ids[fleet])
        for fleet, store in stores.items():
            wait_until(lambda store=store, fleet=fleet: store.ledger.counts().decided >= len(ids[fleet]))  # type: ignore[misc]
    for fleet, store in stores.items():
        assert store.ledger.counts() == (len(ids[fleet]), 0, len(ids[fleet]), 0)
        assert sorted(each.decision.trace_id for each in store.ledger.all_decided()) == sorted(ids[fleet])
        assert {entry.trace_id for entry in only_log(store).entries()} == set(ids[fleet])
        assert sorted(each["trace_id"] for each in published(settings[fleet])) == sorted(ids[fleet])
        store.close()
    _, administrator = alone
    # Neither fleet has tried to touch keys of the other. redis-py may not send its name and version, which does no harm.
    assert {entry["object"] for entry in administrator.acl_log()} <= {"client", "client|setinfo"}
