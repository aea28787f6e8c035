"""The arena of each case, on both brokers."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.arena import Arena, BrokerName


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> BrokerName:
    """The broker of the case; one that has to do with one broker only is parametrised with that."""
    name: BrokerName = request.param
    return name


@pytest.fixture
def arena(broker: BrokerName, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    """A store and a broker of the test's own."""
    url = str(request.getfixturevalue("rabbitmq_url")) if broker == "rabbitmq" else ""
    suffix = uuid.uuid4().hex
    names = {f"queues.{kind}": f"{kind}-{suffix}" for kind in ("traces", "accepted", "rejected", "dead")}
    with Arena(broker, url, tmp_path, names) as opened:
        yield opened
