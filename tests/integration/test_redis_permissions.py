"""The commands that the scorer needs on its store, and no others: what the documents list is enough."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
import redis
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.novelty import NoveltyCache
from kp_scorer.novelty.audit import audit
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings
from kp_scorer.store import Store, Submission

from tests.support.documents import code_with
from tests.support.fast_worker import WordHashEmbedder
from tests.support.processes import wait_until
from tests.support.traces import fresh_samples


def _documented_rules() -> list[str]:
    """The rule in the documents, as an operator would copy it."""
    _, _, rule = code_with("ACL SETUSER scorer").partition("ACL SETUSER scorer ")
    return shlex.split(rule.replace("\\\n", " ").partition("\n")[0])


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
        _use_everything(Store(client, Settings()), Settings())
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("other:key", "1")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.keys("*")


def test_every_command_of_a_script_is_documented() -> None:
    scripts = resources.files("kp_scorer.store").joinpath("lua").iterdir()
    called = {name.lower() for script in scripts for name in re.findall(r"redis\.call\('(\w+)'", script.read_text("utf-8"))}
    assert called
    assert {f"+{name}" for name in called} <= set(_documented_rules())


def _use_everything(store: Store, settings: Settings) -> None:
    store.ping()
    ledger, letters, window = store.ledger, store.dead_letters, settings.novelty.window()
    embedder = WordHashEmbedder(settings.embedding)
    cache = NoveltyCache(store.novelty_log(embedder.space), window, embedder.dimensions)
    decider = Decider(ledger, Policy(), NoveltyMeter(embedder, cache), settings.worker.max_attempts)
    decider.refresh()
    one, other = (decode_trace(payload, Limits()) for payload in fresh_samples(2))
    submission = Submission(one.id, one.digest(), b"{}")
    assert ledger.open([submission]) == ["pending"]
    assert len(ledger.claim_lost(0, queue_is_empty=True)) <= 1
    ledger.resent(one.id)
    ledger.renew()
    store.drops.note("decisions.rejected")
    assert store.drops.counts() == {"decisions.rejected": 1}
    ledger.release([one.id])
    assert all(isinstance(decided, Decision) for decided in decider.decide([one, other]))
    assert ledger.open([submission]) == ["decided"]
    letters.bury(b'{"id": "kp:trace:bad"}', "invalid", "$: expected more", "kp:trace:bad")
    (found,) = store.novelty_logs()
    assert found.info().entries == 2
    assert audit(list(found.entries()), ledger.decided, window, lambda done, total: None).agreeing == 2
    assert (found.erase(one.id), ledger.erase(one.id)) == (1, 1)
    (letter,) = letters.read()
    assert letters.payload(letter.letter_id) == b'{"id": "kp:trace:bad"}'
    assert ledger.counts() == (3, 0, 2, 1)
    assert letters.drop(letter)
    found.clear()
