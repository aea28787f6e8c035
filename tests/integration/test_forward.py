"""``kp-scorer forward``: each decision reaches a receiver at least once, whoever is killed, and what is refused is kept."""

import base64
import hmac
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from google.protobuf.json_format import ParseDict
from kp_scorer.cli.main import commands
from kp_scorer.decision import Decision, RevisedBy
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store
from kp_scorer.store.runs import ClaimedRun, ReceivedSpan
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from tests.integration.test_reading_decisions import publish
from tests.support.builders import decided, make_trace
from tests.support.changed_settings import SettingsWith
from tests.support.commands import COMMAND, invoked
from tests.support.processes import free_port, opened, wait_until

SECRET = b"a secret of this test"
VARIABLES = {
    "WEBHOOK_SECRET": f"whsec_{base64.b64encode(SECRET).decode()}",
    "LANGFUSE_PUBLIC_KEY": "pk-lf-1",
    "LANGFUSE_SECRET_KEY": "sk-lf-1",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x,,",
}


def decisions(count: int) -> list[Decision]:
    return [decided(make_trace(trace_id=f"kp:trace:{number}")) for number in range(count)]


class Receiving:
    """A receiver's address, its process when it is opened, and what it has received."""

    def __init__(self, folder: Path) -> None:
        self.port, self.file = free_port(), folder / "received.jsonl"
        self.url = f"http://127.0.0.1:{self.port}"

    def process(self, status: int = 200) -> AbstractContextManager[Any]:
        return opened(sys.executable, "-m", "tests.support.receiver", str(self.port), str(self.file), str(status))

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []


@pytest.fixture
def receiving(tmp_path: Path) -> Receiving:
    return Receiving(tmp_path)


def test_each_decision_arrives_signed_whoever_is_killed(on_broker: SettingsWith, receiving: Receiving) -> None:
    settings, made = on_broker(broker__visibility_timeout_s=3), decisions(40)
    assert all(publish(settings, made))
    arguments = (*COMMAND, "forward", "--to", "webhook", "--url", f"{receiving.url}/kp", "--follow")
    forwarding = partial(opened, *arguments, env=os.environ | as_environment(settings) | VARIABLES)

    def has(count: int) -> Callable[[], bool]:
        return lambda: len({json.loads(row["body"])["trace_id"] for row in receiving.rows()}) >= count

    with forwarding() as first:
        with receiving.process() as receiver:
            wait_until(has(5))
            receiver.kill()
        with receiving.process():
            wait_until(has(15))
            first.kill()
            with forwarding():
                wait_until(has(40))
    for row in receiving.rows():
        head = f"{row['webhook-id']}.{row['webhook-timestamp']}.".encode()
        signature = base64.b64encode(hmac.digest(SECRET, head + row["body"].encode(), "sha256")).decode()
        assert (row["path"], row["webhook-signature"]) == ("/kp", f"v1,{signature}")
        assert Decision.model_validate_json(row["body"]) in made


def test_revisions_are_handed_on_apart(settings: Settings, receiving: Receiving) -> None:
    first = decided(make_trace(trace_id="kp:trace:late"))
    publish(settings, [first, first.model_copy(update={"revision": 2, "revised_by": RevisedBy(id="tests", success=False)})])
    with receiving.process():
        assert "forwarded 1 decisions" in forward(settings, "langfuse", receiving.url).stderr
        assert "forwarded 1 decisions" in forward(settings, "langfuse", receiving.url, "--outcome", "revised").stderr
    assert len({json.loads(row["body"])["id"] for row in receiving.rows()}) == 1


def forward(settings: Settings, receiver: str, url: str, *arguments: str | Path) -> Any:
    variables = as_environment(settings) | VARIABLES
    return invoked(commands, "forward", "--to", receiver, "--url", url, *arguments, env=variables)


def test_langfuse_gets_one_score_for_each_trace(settings: Settings, receiving: Receiving) -> None:
    publish(settings, [decided(make_trace(trace_id="kp:trace:langfuse:run%20one"))])
    with receiving.process():
        done = forward(settings, "langfuse", receiving.url)
    assert "forwarded 1 decisions" in done.stderr, done.output
    (row,) = receiving.rows()
    score = json.loads(row["body"])
    assert (row["path"], base64.b64decode(row["authorization"].split()[1])) == ("/api/public/scores", b"pk-lf-1:sk-lf-1")
    assert (score["traceId"], score["name"], score["comment"]) == ("run one", "kp-scorer", "rejected")
    assert score["dataType"] == "NUMERIC"


def test_an_event_is_under_the_span_of_the_agent(settings: Settings, store: Store, receiving: Receiving) -> None:
    run_id, span_id = uuid4().hex, uuid4().hex[:16]
    store.runs.store(run_id, [ReceivedSpan(span_id, b"{}")])
    store.runs.close(ClaimedRun(run_id, False, [b"{}"], 0, False), span_id)
    store.runs.finish(run_id)
    decision = decided(make_trace(trace_id=f"kp:trace:otel:{run_id}"))
    publish(settings, [decision, decided(make_trace(trace_id="kp:trace:own"))])
    with receiving.process():
        assert "forwarded 2 decisions" in forward(settings, "otlp", receiving.url).stderr
    of_agent, alone = (json.loads(row["body"]) for row in receiving.rows())
    assert [(row["path"], row["authorization"]) for row in receiving.rows()] == [("/v1/logs", "Bearer x")] * 2
    record = of_agent["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    assert (record.pop("traceId"), record.pop("spanId")) == (run_id, span_id)
    parsed = ParseDict(of_agent, ExportLogsServiceRequest()).resource_logs[0].scope_logs[0].log_records[0]
    values = {each.key: each.value for each in parsed.attributes}
    assert parsed.event_name == "gen_ai.evaluation.result"
    assert values["gen_ai.evaluation.score.value"].double_value == decision.score
    assert values["gen_ai.evaluation.score.label"].string_value == decision.outcome
    assert "traceId" not in json.dumps(alone)


def test_what_a_receiver_refuses_is_kept_in_a_file(settings: Settings, receiving: Receiving, tmp_path: Path) -> None:
    made, refused = decisions(2), tmp_path / "refused.jsonl"
    publish(settings, made)
    with receiving.process(422):
        done = forward(settings, "webhook", receiving.url, "--dead-letters", refused)
    rows = [json.loads(line) for line in refused.read_text().splitlines()]
    assert [Decision.model_validate(row["decision"]) for row in rows] == made, done.output
    assert {(row["to"], row["reason"]) for row in rows} == {("webhook", "status 422")}
    assert "forwarded 0 decisions" in forward(settings, "webhook", receiving.url).stderr


@pytest.mark.parametrize("status", [307, 401, 404])
def test_a_receiver_that_refuses_all_ends_it_and_nothing_is_lost(status: int, settings: Settings, receiving: Receiving) -> None:
    publish(settings, decisions(1))
    with receiving.process(status):
        done = forward(settings, "webhook", receiving.url)
    assert f"status {status}" in str(done.exception)
    assert len(receiving.rows()) == 1


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://user:secret@host", "http://[secret", ""])
def test_an_address_is_checked_and_not_quoted(url: str, settings: Settings) -> None:
    problem = str(forward(settings, "webhook", url).exception)
    assert "--url: expected" in problem
    assert "secret" not in problem
