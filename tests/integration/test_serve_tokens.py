"""Tokens of the HTTP server: what each admits, the queue that it names, and that no token keeps another waiting."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection
from kp_scorer.errors import SettingsError
from kp_scorer.serve.server import serve
from kp_scorer.serve.tokens import read_tokens
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.runs import ReceivedSpan

from tests.support.changed_settings import settings_at, with_changed
from tests.support.commands import command
from tests.support.http_server import SUPPLIED, HttpServer, attributes, chat_span, export_of, new_run, open_server
from tests.support.processes import at_work, wait_until
from tests.support.rabbitmq import RABBITMQ_URL, declare_as_worker, default_queues
from tests.support.traces import fresh_samples

TOKEN = "a-token-of-this-test"
OWN, OTHERS = ({"authorization": f"Bearer {TOKEN}{end}"} for end in ("", "-of-others"))


@pytest.fixture(scope="module")
def server(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server that asks for tokens, and a worker. Nobody empties their database, so tests use ids of their own."""
    folder = tmp_path_factory.mktemp("served")
    tokens, settings = folder / "tokens", settings_at(redis_url.removesuffix("/0") + "/5")
    tokens.write_text(f"# of the agents\n{TOKEN}\n{TOKEN}-of-others\n")
    with at_work(settings, folder), open_server(settings, folder / "server.log", serve__tokens=str(tokens)) as server:
        yield server
    assert TOKEN not in server.process.text()


@pytest.fixture
def store(store: Store) -> Store:
    """The store with the scripts loaded, as a worker has loaded them before anybody submits."""
    store.ledger.load_scripts()
    return store


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """The path of a file by which the traces and the runs of others have a queue of their own."""
    (tmp_path / "tokens").write_text(f"{TOKEN}\n{TOKEN}-of-others traces.others\n")
    return str(tmp_path / "tokens")


def with_two_queues(settings: Settings, tokens: str, **of_others: int) -> Settings:
    return with_changed(settings, queues__traces={"traces": {}, "traces.others": of_others}, serve__tokens=tokens)


def export(server: HttpServer, *senders: dict[str, str]) -> None:
    """Export a run for each sender."""
    for headers in senders:
        assert server.ask("POST", "/v1/traces", export_of(chat_span(new_run())), **headers).status == 200


def test_run_that_somebody_else_sends_too_is_decided(server: HttpServer) -> None:
    first = chat_span(new_run())
    for scope, span, headers in (("one", first, OTHERS), ("two", first | {"traceId": new_run()}, OWN)):
        exported = export_of(span, service__name="tides")
        exported["resourceSpans"][0]["scopeSpans"][0]["scope"] = {"name": scope}
        assert server.ask("POST", "/v1/traces", exported, **headers).status == 200
        assert server.status(span["traceId"], **headers)["state"] == "decided"


def test_a_token_is_asked_for_before_a_body_is_read(server: HttpServer) -> None:
    for path in ("/v1/traces", "/traces"):
        for headers in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": f"Basic {TOKEN}"}):
            refused = server.ask("POST", path, b"{}", **headers)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert server.ask("GET", "/traces/kp:trace:1").status == 401
    assert server.ask("POST", "/traces", fresh_samples(1)[0], **OWN).status == 202
    for method in ("GET", "HEAD"):
        assert server.ask(method, "/livez").status == server.ask(method, "/readyz").status == 200


def test_a_token_may_send_late_outcomes_only_of_traces_that_came_with_it(server: HttpServer) -> None:
    (trace,) = fresh_samples(1)
    path, late = f"/traces/{trace['id']}/outcome", {"success": False, "reason": "late"}
    (row,) = server.ask("POST", "/traces", trace, **OWN).json["traces"]
    wait_until(lambda: server.ask("GET", f"/traces/{trace['id']}", **OWN).json.get("decision"))
    for body, status in (
        (late, 403),
        (late | {"key": "guessed"}, 403),
        ([], 400),
        ({"key": row["outcome_key"]}, 400),
    ):
        assert server.ask("POST", path, body, **OTHERS).status == status
    answer = server.ask("POST", path, late | {"key": row["outcome_key"]}, **OWN)
    assert (answer.status, answer.json["trace_id"]) == (202, trace["id"])
    outcome = f"/traces/{answer.json['outcome_id']}"
    decision = wait_until(lambda: server.ask("GET", outcome, **OWN).json.get("decision"))
    assert server.ask("GET", f"/traces/{trace['id']}", **OTHERS).json["decision"] == decision
    conflicting = late | {"key": row["outcome_key"], "id": answer.json["outcome_id"], "success": True}
    assert server.ask("POST", path, conflicting, **OWN).status == 409
    assert (decision["revision"], decision["revised_by"]["reason"]) == (2, "late")


def test_a_token_has_its_queue_for_traces_and_for_spans(
    settings: Settings, tokens: str, tmp_path: Path, redis_client: redis.Redis, store: Store
) -> None:
    both = with_two_queues(settings, tokens, limit=2)
    with open_server(both, tmp_path / "server.log") as server:
        for headers in (OWN, OTHERS):
            assert server.ask("POST", "/traces", fresh_samples(1)[0], **headers).status == 202
        export(server, OWN, OTHERS)
        wait_until(lambda: [redis_client.llen(name) for name in both.queues.traces] == [2, 2])
        assert [server.ask("POST", "/traces", fresh_samples(1)[0], **each).status for each in (OWN, OTHERS)] == [202, 429]
    with pytest.raises(SettingsError, match=r"^queue: expected one of traces, as"):
        serve(with_changed(settings, serve__tokens=tokens, serve__port=0))


def test_a_replayed_run_goes_to_the_queue_of_its_token(
    settings: Settings, tokens: str, tmp_path: Path, redis_client: redis.Redis, store: Store
) -> None:
    both = with_two_queues(settings, tokens)
    with open_server(both, tmp_path / "server.log", queues__message_bytes=400) as server:
        export(server, OTHERS)
        wait_until(lambda: list(store.dead_letters.read()))
    assert command(with_changed(both, **SUPPLIED), "dead-letter", "replay").exit_code == 0
    with open_server(both, tmp_path / "mended.log"):
        wait_until(lambda: sum(redis_client.llen(name) for name in both.queues.traces))
        assert redis_client.llen("traces.others") == 1


def test_a_full_queue_keeps_no_run_of_another_queue_waiting(
    settings: Settings, tokens: str, tmp_path: Path, store: Store
) -> None:
    with open_server(with_two_queues(settings, tokens, limit=1), tmp_path / "server.log") as server:
        assert server.ask("POST", "/traces", fresh_samples(1)[0], **OTHERS).status == 202
        export(server, *[OTHERS] * 12, OWN)
        wait_until(lambda: server.process.events("run_submitted"))
        # The first run shows that its queue is full, so the others need not be tried before the run of the other queue.
        assert len(server.process.events("runs_wait")) < 6
        # The runs of the full queue still wait for room.
        assert store.runs.held()[0] == 12


def test_a_queue_that_cannot_be_used_keeps_no_run_or_request_of_another_waiting(
    redis_url: str, tokens: str, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSTANTS", "serve.submitter._AWAY_S=3")
    with default_queues(RABBITMQ_URL, redis_url) as defaults:
        both = with_two_queues(defaults, tokens)
        declare_as_worker(both)
        with Connection(both.broker.url) as connection:
            # An administrator has replaced the queue by one of another kind.
            connection.default_channel.queue_delete("traces.others")
            connection.default_channel.exchange_delete("traces.others")
            connection.default_channel.queue_declare("traces.others", durable=True)
        with open_server(both, tmp_path / "server.log") as server:
            export(server, *[OTHERS, OWN] * 12)
            server.process.logged("run_submitted", 12)
            assert "PRECONDITION_FAILED" in server.process.logged("runs_wait")[0]["detail"]
            assert len(server.process.events("runs_wait")) < 6

            def still_waits(times: int) -> bool:
                # A load balancer sends requests, whoever they come from, only to processes that are ready.
                assert server.ask("GET", "/readyz").status == 200
                return len(server.process.events("runs_wait")) > times

            wait_until(partial(still_waits, 4))


def test_many_runs_of_one_token_keep_no_run_of_another_waiting(
    settings: Settings, store: Store, tmp_path: Path, keys: Keys, redis_client: redis.Redis
) -> None:
    for sender in ["one"] * 40 + ["another"]:
        span = chat_span(new_run())
        store.runs.store(span["traceId"], [ReceivedSpan(span["spanId"], json.dumps(span).encode())], "", sender)
    make_due(redis_client, keys)
    with open_server(settings, tmp_path / "server.log") as server:
        submitted = [event["trace_id"] for event in server.process.logged("run_submitted", 41)]
    assert f"kp:trace:otel:{span['traceId']}" in submitted[:3]


def test_long_runs_of_one_token_take_no_more_time_than_those_of_another(
    settings: Settings, tokens: str, store: Store, tmp_path: Path, keys: Keys, redis_client: redis.Redis
) -> None:
    # The server reads such a result character by character.
    result, long_runs = "[" + "{}," * 60_000 + "'1']", set[str]()
    tool = attributes(gen_ai__operation__name="execute_tool", gen_ai__tool__name="a", gen_ai__tool__call__result=result)
    for sender in ["of a full queue"] * 100 + ["one"] * 8 + ["another"] * 60:
        run_id, root = new_run(), "00000000000000aa"
        spans = [chat_span(run_id, root) | {"attributes": tool}] if sender == "one" else []
        spans.append(chat_span(run_id) | {"spanId": root})
        long_runs |= {f"kp:trace:otel:{run_id}"} if sender == "one" else set()
        received = [ReceivedSpan(span["spanId"], json.dumps(span).encode()) for span in spans]
        store.runs.store(run_id, received, "traces.others" if sender == "of a full queue" else "", sender)
    make_due(redis_client, keys)
    with open_server(with_two_queues(settings, tokens, limit=1), tmp_path / "server.log") as server:
        # This trace fills the queue, or else the first run does.
        server.ask("POST", "/traces", fresh_samples(1)[0], **OTHERS)
        submitted = [event["trace_id"] for event in server.process.logged("run_submitted", 68)]
    assert len(long_runs & {*submitted[:55]}) < 5


def make_due(redis_client: redis.Redis, keys: Keys) -> None:
    """Make all runs due, in the order in which they came."""
    run_ids: Any = redis_client.zrange(keys.runs, 0, -1)
    redis_client.zadd(keys.runs, {run_id: place for place, run_id in enumerate(run_ids)})


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [("", 0o600, "a token"), ("short", 0o600, "a token"), (f"{TOKEN} a b", 0o600, "a token"), (TOKEN, 0o602, "write")],
)
def test_an_invalid_file_of_tokens_or_one_that_others_can_write_to_is_refused(
    content: str, mode: int, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(SettingsError, match=expected):
        read_tokens(str(file))
