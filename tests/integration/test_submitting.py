"""What submitting leaves behind."""

from typing import Any

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import DecisionTimeout, InvalidTrace, SettingsError
from kp_scorer.settings import Settings

from tests.support.builders import LIMITS, minimal_payload
from tests.support.traces import fresh_samples, new_id


def test_waiting_for_what_was_never_submitted_ends_with_that(settings: Settings) -> None:
    (trace,) = fresh_samples(1)
    with Client(settings) as client:
        with pytest.raises(DecisionTimeout, match="it is unknown"):
            client.wait(new_id(), timeout_s=0.05)
        # Nobody consumes this database's queue.
        with pytest.raises(DecisionTimeout, match="it is still pending"):
            client.wait(client.submit(trace), timeout_s=0.05)


def test_submitting_subscribes_to_no_result(settings: Settings, redis_client: redis.Redis) -> None:
    # Workers of other tests may still be about to let go of theirs.
    others = {each["id"] for each in redis_client.client_list()}
    with Client(settings) as client:
        for trace in fresh_samples(3):
            client.submit(trace)
        connected: Any = redis_client.client_list()
        assert redis_client.pubsub_channels() == []
        ours = [each for each in connected if each["id"] not in others]
        assert ours
        assert {(int(each["sub"]), int(each["psub"])) for each in ours} == {(0, 0)}


def test_producers_with_namespaces_do_not_take_each_others_ids(settings: Settings) -> None:
    with Client(settings, "billing") as one, Client(settings, "search.2") as other:
        payload = minimal_payload(trace_id="kp:trace:1", objective="one")
        taken = one.submit(payload), other.submit(minimal_payload(trace_id="kp:trace:1", objective="another"))
        assert taken == ("kp:trace:billing:1", "kp:trace:search.2:1")
        assert [status and status.state for status in one.look_up([*taken, "kp:trace:1"])] == ["pending", "pending", None]
        assert payload["id"] == "kp:trace:1", "a caller's object stays as it is"
        # Submitted again, by its new name, or as a trace that is checked already.
        assert one.submit(payload | {"id": taken[0]}) == taken[0]
        assert one.submit(decode_trace(payload, LIMITS)) == taken[0]


def test_namespace_counts_as_part_of_the_id(settings: Settings) -> None:
    with Client(settings, "n" * 64) as client:
        for unfit in ("kp:trace:" + "x" * 127, "trace:1"):
            with pytest.raises(InvalidTrace, match=r"^id: "):
                client.submit(minimal_payload(trace_id=unfit))
        assert client.submit(minimal_payload(trace_id="kp:trace:" + "x" * 126))


@pytest.mark.parametrize("namespace", ["a:b", "a b", "\u00e9", "n" * 65, "a\n"])
def test_namespace_of_other_characters_is_refused(settings: Settings, namespace: str) -> None:
    with pytest.raises(SettingsError, match=r"^namespace: expected"):
        Client(settings, namespace)
