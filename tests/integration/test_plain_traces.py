"""A bare trace, put on the queue by any client, is decided once or dead-lettered with its reason, like any submission."""

import json
from pathlib import Path

import pytest
from kp_scorer.errors import TraceDead
from kp_scorer.store import Store

from tests.support.arena import put
from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.commands import command
from tests.support.outcomes import published
from tests.support.processes import PATIENCE_S, at_work, wait_until
from tests.support.traces import fresh_samples, new_id


def test_a_plain_trace_is_decided_once_even_if_others_submit_it_too(
    on_broker: SettingsWith, store: Store, tmp_path: Path
) -> None:
    settings, traces = on_broker(), fresh_samples(3)
    plain = [json.dumps(trace).encode() for trace in traces]
    with at_work(settings, tmp_path) as (worker, client):
        put(settings, plain[0])
        first = client.as_completed([traces[0]["id"]], timeout_s=PATIENCE_S)
        assert [status.state for status in first] == ["decided"]
        for body, trace in zip(plain, traces, strict=True):
            # Other bytes with the same content are the same trace.
            put(settings, json.dumps(json.loads(body), indent=1).encode())
            client.submit(trace)
            put(settings, body)
        statuses = list(client.as_completed([trace["id"] for trace in traces], timeout_s=PATIENCE_S))
        # The client sends nothing for a trace that it finds decided, so only the seven messages put above are certain.
        wait_until(lambda: len(worker.events("trace_decided")) >= 7)
    assert {status.state for status in statuses} == {"decided"}
    assert store.ledger.counts() == (3, 0, 3, 0)
    decisions = {json.dumps(decision, sort_keys=True) for decision in published(settings)}
    assert len(decisions) == 3


def test_an_invalid_plain_trace_is_dead_lettered_with_its_reason_and_bytes(
    on_broker: SettingsWith, store: Store, tmp_path: Path
) -> None:
    settings = on_broker()
    (trace,) = fresh_samples(1)
    wrong = json.dumps(trace | {"steps": []}).encode()
    # Only the spaces make this larger than a trace may be.
    long = json.dumps(trace | {"id": new_id(), "steps": trace["steps"] * 100}).encode() + b" " * 150_000
    sent = {
        wrong: ("invalid", "steps: "),
        long: ("invalid", "$: expected at most 100000 bytes"),
        b"{}": ("invalid", "@context: "),
        b'{"mood": [%s]}' % b",".join([b"{}"] * 20_000): ("invalid", "$: expected at most 20100 values"),
        b'{"mood": "%s"}' % (b"x" * 300_000): ("invalid", "$: expected at most 100000 bytes"),
        b'{"task": "score_trace", "args": [{}, {}]}': ("invalid", "$: expected the trace as the only argument of score_trace"),
        b'{"task": "other", "args": [{}]}': ("malformed", "task: expected score_trace"),
        b"[]": ("malformed", ""),
        b"{no JSON": ("malformed", "body: not JSON: Expecting property name enclosed in double quotes at line 1 column 2"),
    }
    strict = with_changed(settings, queues__message_bytes=100_000)
    with at_work(strict, tmp_path) as (_, client):
        put(settings, *sent)
        with pytest.raises(TraceDead, match=r"steps|bytes"):
            client.wait(trace["id"], timeout_s=30)
        wait_until(lambda: len(list(store.dead_letters.read())) == len(sent))
    letters = {store.dead_letters.payload(letter.letter_id): letter for letter in store.dead_letters.read()}
    assert letters.keys() == sent.keys()
    for body, (reason, detail) in sent.items():
        assert letters[body].reason == reason
        assert letters[body].detail.startswith(detail)
    # A message that is too large is not parsed, so the id of its trace is not known.
    assert [letters[body].trace_id for body in (wrong, long)] == [trace["id"], ""]

    replayed = command(settings, "dead-letter", "replay", letters[long].letter_id)
    assert json.loads(replayed.stdout)["state"] == "pending"
    with at_work(settings, tmp_path) as (_, client):
        assert client.wait(json.loads(long)["id"], timeout_s=PATIENCE_S)
    assert letters[long].letter_id not in [letter.letter_id for letter in store.dead_letters.read()]
