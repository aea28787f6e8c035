"""The commands that the scorer needs on its store, and no others: what the README lists is enough."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.conftest import REPOSITORY
from tests.fast_worker import WordHashEmbedder
from tests.processes import wait_until
from tests.traces import fresh_samples
from worker.audit import audit
from worker.dead_letters import DeadLetters
from worker.decider import Decider, NoveltyStage
from worker.decision import Decision
from worker.keys import Keys
from worker.ledger import RedisLedger, Submission
from worker.novelty import NoveltyCache, RedisLog, Window
from worker.scoring import Policy
from worker.settings import EmbeddingSettings
from worker.trace import Limits, decode_trace

WINDOW = Window(max_elements=100, ttl_ms=60_000, slack_elements=1_000, slack_ms=60_000)
KEYS = Keys("kp")


def _documented_rules() -> list[str]:
    """The rule in the README, as an operator would copy it."""
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    found = re.search(r"ACL SETUSER scorer (.*?)\n\n", readme, re.DOTALL)
    assert found
    return found.group(1).replace("\\\n", " ").split()


@pytest.fixture(params=["embedded", "redis-server on the PATH"])
def server(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[str]:
    """The embedded Redis 6.2, and whatever newer server the machine has."""
    if request.param == "embedded":
        yield redis_url
        return
    executable = shutil.which("redis-server")
    if executable is None:
        pytest.skip("there is no redis-server on the PATH")
    socket = tmp_path / "redis.sock"
    arguments = [executable, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
        wait_until(socket.exists, timeout_s=10)
        yield f"unix://{socket}"
        process.terminate()


def test_the_documented_permissions_are_enough_for_everything(server: str) -> None:
    with redis.Redis.from_url(server) as admin:
        admin.flushdb()
        # So that loading scripts needs permission too.
        admin.script_flush()
        admin.execute_command("ACL", "SETUSER", "scorer", "reset", *_documented_rules())
    with redis.Redis.from_url(re.sub(r"//(.*@)?", "//scorer:secret@", server, count=1)) as client:
        _use_everything(client)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("other:key", "1")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.keys("*")


def _use_everything(client: redis.Redis) -> None:
    assert client.ping()
    ledger, letters = RedisLedger(client, KEYS, ttl_ms=60_000), DeadLetters(client, KEYS, record_ttl_ms=60_000)
    embedder = WordHashEmbedder(EmbeddingSettings())
    log = RedisLog(client, KEYS, embedder.space, WINDOW, record_ttl_ms=60_000)
    decider = Decider(ledger, Policy(), NoveltyStage(embedder, NoveltyCache(log, WINDOW, embedder.dimensions)))
    decider.refresh()
    one, other = (decode_trace(payload, Limits()) for payload in fresh_samples(2))
    submission = Submission(one.id, one.content_digest(), b"{}")
    assert ledger.open([submission]) == ["pending"]
    assert len(ledger.claim_lost(0, queue_is_empty=True)) <= 1
    ledger.absolve([one.id])
    assert all(isinstance(decided, Decision) for decided in decider.decide([one, other]))
    assert ledger.open([submission]) == ["decided"]
    letters.bury(b'{"id": "kp:trace:bad"}', "invalid", "$: expected more", "kp:trace:bad")
    (found,) = RedisLog.of_all_spaces(client, KEYS, WINDOW, record_ttl_ms=60_000)
    assert found.info().entries == 2
    assert audit(found, ledger, WINDOW, lambda done, total: None).agreeing == 2
    assert (found.erase(one.id), ledger.erase(one.id)) == (1, 1)
    (letter,) = letters.read()
    assert letters.payload(letter.letter_id) == b'{"id": "kp:trace:bad"}'
    assert ledger.counts() == (3, 0, 2, 1)
    assert letters.drop(letter.letter_id)
    found.clear()
