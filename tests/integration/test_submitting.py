"""What submitting leaves behind."""

from typing import Any

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.errors import DecisionTimeout
from kp_scorer.settings import Settings

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
