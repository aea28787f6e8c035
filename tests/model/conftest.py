"""A Redis for the model alone. The test moves its clock, and it is emptied before every run."""

from collections.abc import Iterator

import pytest

from tests.model.server import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model")) as started:
        yield started
