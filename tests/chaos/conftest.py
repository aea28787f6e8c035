"""The arena of each case, on both brokers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.arena import Arena, BrokerName
from tests.support.rabbitmq import own_queues


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> BrokerName:
    """The broker of the case; one that has to do with one broker only is parametrised with that."""
    name: BrokerName = request.param
    return name


@pytest.fixture
def arena(broker: BrokerName, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    """A store and a broker of the test's own."""
    url = str(request.getfixturevalue("rabbitmq_url")) if broker == "rabbitmq" else ""
    with Arena(broker, url, tmp_path, own_queues()) as opened:
        yield opened
