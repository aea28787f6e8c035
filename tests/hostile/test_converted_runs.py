"""An agent's text can harm only the conversion of its own run: no server, no probe and no other run."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import redis
from kp_scorer.bounded import BoundedProcess, Bounds
from kp_scorer.errors import ProcessFailed
from kp_scorer.serve.run_converter import SUPPLIED
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys

from tests.support.http_server import (
    CONTAINER_BYTES,
    CONTAINER_SERVE,
    HttpServer,
    attributes,
    chat_span,
    export_of,
    new_run,
    open_server,
)
from tests.support.processes import at_work, slowness, wait_until
from tests.support.servers import redis_servers
from tests.support.shipped import Shipped

MIB: Final = 2**20
SECRET: Final = "canary-7f3a"
PROBE_S: Final = 3.0
"""The time in which a probe must be answered, however busy the conversion is; a slow machine gets more in proportion."""

ROOT: Final = "00000000000000aa"
CUT_OFF: Final = json.dumps({"rows": [{"name": "a", "note": json.dumps({"x": [1, "two"]})}] * 900})[:50_000]

# The arguments and the result of a tool. Several of these once took a gigabyte of memory, or minutes.
TEXTS: Final[dict[str, tuple[str, str]]] = {
    "an unfinished list and a sign of Python": ("{}", "[" + "a," * 497_000 + "1]='"),
    "arguments of a megabyte": (json.dumps({"a": ["b c"] * 100_000})[:-2], "done"),
    "an unclosed triple quote": ("{}", '["""' + "a" * 300_000),
    "triple quotes": ("{}", "['''" + "'''a\"\"\"" * 70_000),
    "JSON within JSON that is cut off": ("{}", json.dumps(CUT_OFF)[:-20]),
    "a number of many digits": ('{"a": 0x' + "f" * 4_000 + ", 'b': 1}", "[" + "7" * 900_000 + ", '']"),
    "deep nesting": ("[" * 300_000, "{'a':" * 120_000 + "'"),
    "escapes": ("{}", "['" + "\\" * 450_000),
    "commands": ("{}", "```bash\n" * 100_000),
    "values by the thousand": ("[" + "[]," * 150_000 + "1]", json.dumps([{"a": None}] * 30_000)),
    "members of enumerations": ("{}", "[" + "<a.b: 'c'>, " * 70_000 + "'"),
    "halves of characters": ('{"a": "\\ud800"}', "['" + "\\ud800" * 140_000 + "']"),
}

# The server itself sets these bounds, so one kind of Redis is enough, also to show that the server's user may do all this.
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("shipped_redis", redis_servers()[:1], indirect=True)]


@pytest.fixture
def server(shipped_redis: Shipped, redis_client: redis.Redis, keys: Keys, tmp_path: Path) -> Iterator[HttpServer]:
    """A server with the memory of its container, and a worker beside it."""
    limits = {"serve__quiet_s": 0.3, "worker__max_attempts": 1}
    with (
        at_work(shipped_redis.settings("worker"), tmp_path),
        open_server(shipped_redis.settings("serve"), tmp_path / "server.log", *CONTAINER_SERVE, **limits) as opened,
    ):
        yield opened
        # The state of a run is known a moment before the run is removed.
        wait_until(lambda: redis_client.zcard(keys.runs) == 0)
        assert SECRET not in opened.process.text()
    assert shipped_redis.refused() == []


def tool_span(run_id: str, arguments: str, result: str) -> dict[str, Any]:
    of_tool = {"gen_ai__operation__name": "execute_tool", "gen_ai__tool__name": SECRET}
    texts = {"gen_ai__tool__call__arguments": arguments, "gen_ai__tool__call__result": result}
    return chat_span(run_id, ROOT) | {"attributes": attributes(**of_tool, **texts)}


def export_run(server: HttpServer, *tools: tuple[str, str]) -> str:
    """Send a run whose tools received and returned these texts, with its root last; return its id."""
    run_id = new_run()
    for arguments, result in tools:
        assert server.export(tool_span(run_id, arguments, result)).json == {}
    assert server.export(chat_span(run_id) | {"spanId": ROOT}).json == {}
    return run_id


def converting_process(server: HttpServer) -> psutil.Process:
    return wait_until(lambda: next(iter(psutil.Process(server.process.process.pid).children()), None))


@contextmanager
def probed(server: HttpServer) -> Iterator[None]:
    """Assert that probes are answered in time as long as the block runs, and that all processes fit into the container."""
    ending, longest_s, most_bytes = threading.Event(), [0.0], [0]

    def probe() -> None:
        process = psutil.Process(server.process.process.pid)
        while not ending.wait(0.05):
            started_s = time.monotonic()
            assert server.ask("GET", "/livez").status == 200
            elapsed_s = time.monotonic() - started_s
            # Measure how slow the machine is only after a late answer, because that takes processor time from the conversion.
            longest_s.append(elapsed_s if elapsed_s < PROBE_S else elapsed_s / slowness())
            # A child may end before its memory is read.
            with suppress(psutil.NoSuchProcess):
                most_bytes.append(sum(each.memory_info().rss for each in (process, *process.children())))

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
    assert max(longest_s) < PROBE_S
    assert max(most_bytes) < CONTAINER_BYTES - 100 * MIB


@pytest.fixture
def two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a conversion two minutes: on a busy machine all hostile texts at once take longer than the server's own 20 s."""
    monkeypatch.setenv("CONSTANTS", "serve.submitter._CONVERTING_S=120")


@pytest.mark.usefixtures("two_minutes")
def test_hostile_texts_end_with_their_run_and_all_others_are_decided(server: HttpServer) -> None:
    converting = converting_process(server).pid
    with probed(server):
        hostile = {name: export_run(server, texts) for name, texts in TEXTS.items()}
        hostile["all of them"] = export_run(server, *TEXTS.values())
        honest = export_run(server, ("{}", "At 04:12."))
        states = {name: server.status(run_id) for name, run_id in hostile.items()}
        assert server.status(honest)["state"] == "decided"
    # Each of these runs is either too large for a trace, or its texts are read as plain texts.
    assert {state.get("reason", "decided") for state in states.values()} <= {"invalid", "decided"}
    assert converting_process(server).pid == converting


@pytest.fixture
def six_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a conversion six seconds instead of the server's own 20 s, so that the test need not wait as long."""
    monkeypatch.setenv("CONSTANTS", "serve.submitter._CONVERTING_S=6")


@pytest.mark.usefixtures("six_seconds")
def test_run_that_takes_longer_than_it_may_becomes_a_dead_letter_and_others_go_on(
    server: HttpServer, keys: Keys, redis_client: redis.Redis, store: Store
) -> None:
    converting = converting_process(server)
    # The server has to read these fifteen megabytes character by character.
    tools = [("[" + "{}," * 150_000 + "'1']", "[" + "[]," * 150_000 + "'1']")] * 14
    with probed(server):
        costly, honest = export_run(server, *tools), export_run(server, ("{}", "At 04:12."))
        (event,) = wait_until(lambda: server.process.events("run_not_converted"))
        assert (event["otel_trace_id"], event["detail"]) == (costly, "it took longer than 6 s")
        assert server.status(honest)["state"] == "decided"
        assert not converting.is_running()
        # End the claim on the run, so that the server tries it again at once.
        redis_client.zadd(keys.runs, {costly: 0}, xx=True)
        status = server.status(costly)
    assert status["reason"] == "poison"
    assert status["detail"].startswith("$: the conversion was tried 1 times; each time it took longer than 6 s or more than")
    (letter,) = store.dead_letters.read()
    assert store.dead_letters.payload(letter.letter_id).count(b'"traceId"') == len(tools) + 1


def test_conversion_without_memory_ends_its_process_and_the_next_one_works(settings: Settings) -> None:
    supplied = settings.serve.model_dump(include={*SUPPLIED}) | {"success": True, "confidence": 0.8}
    arguments = json.dumps(supplied), settings.limits.model_dump_json(), "300000"
    converting = BoundedProcess("kp_scorer.serve.run_converter", arguments, Bounds(30.0, 120.0, 64 * MIB))
    large, small = export_of(tool_span(new_run(), "[" + "{}," * 900_000 + "0]", "done")), export_of(chat_span(new_run()))
    with closing(converting):
        with pytest.raises(ProcessFailed, match="its process has ended"):
            converting.ask(json.dumps(large).encode())
        assert "trace" in converting.ask(json.dumps(small).encode())
