"""The commands on the operators' pages run unchanged, by the users that the pages name, on a fleet at work."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering

from tests.support.commands import command, run_in_shell
from tests.support.documents import Line, lines_of
from tests.support.processes import PATIENCE_S, at_work, free_port
from tests.support.servers import default_server, redis_cli
from tests.support.shipped import Shipped
from tests.support.traces import fresh_samples

PAGES: Final = ("deploy/OPERATIONS.md", "deploy/INCIDENTS.md", "deploy/SECURITY.md")
COMMAND: Final = re.compile(r"(kp-scorer (?!worker|up|reference|quality|cache (warm|unpin))|redis-cli (?!-))")
"""The commands that this test runs. Others run in tests that make users, copies, virtual hosts or sets, or load a model."""
AS_ADMINISTRATOR: Final = "# as an administrator"
REFUSED: Final = re.compile(r"^(ERR|NO\w+|WRONG\w+|\(error\))", re.MULTILINE)


class Fleet:
    """A fleet that can supply the decided traces, dead letters and groups on which the commands act."""

    def __init__(self, server: Shipped, directory: Path, via: str) -> None:
        self.server, self.directory, self._via = server, directory, via
        self.port = free_port()
        self.settings = {user: self._settings(user) for user in ("client", "worker", "operator")}
        self._traces = iter(fresh_samples(48))

    def filled(self, command: str) -> str:
        """Return a command in which placeholders, such as ID, are replaced by ids that exist."""
        if re.search(r"\bforget ID\b", command):
            command = re.sub(r"\bID\b", self.decided(), command)
        if re.search(r"\bAGENT\b", command):
            self.decided("kp:agent:clerk")
            command = re.sub(r"\bAGENT\b", "kp:agent:clerk", command)
        if re.search(r"\bID\b", command):
            command = re.sub(r"\bID\b", self.dead_lettered(), command)
        if command == "kp-scorer audit":
            # The audit needs a decision to check, even after the log has been emptied.
            self.decided()
        return re.sub(r"\bGROUP\b", "readers", command)

    def decided(self, agent: str | None = None) -> str:
        """Have a trace of this agent decided, and return its id."""
        trace = next(self._traces)
        trace["metadata"]["agent_id"] = agent
        with Client(self.settings["client"]) as client:
            return client.wait(client.submit(trace), timeout_s=PATIENCE_S).trace_id

    def dead_lettered(self) -> str:
        """Store a dead letter; return its id."""
        trace = next(self._traces)
        with Store.open(self.settings["worker"]) as store:
            before = {letter.letter_id for letter in store.dead_letters.read()}
            store.dead_letters.dead_letter(json.dumps(trace).encode(), DeadLettering("poison", "ended its worker", trace["id"]))
            (letter_id,) = {letter.letter_id for letter in store.dead_letters.read()} - before
        return letter_id

    def _settings(self, user: str) -> Settings:
        url = self.server.url(user)
        chosen = {
            "metrics.port": self.port,
            "results.via": self._via,
            "scoring.threshold": 1.0,
            "embedding.embedder": "none",
        }
        return load_settings({"broker.url": url, "redis.url": url, **chosen})


@pytest.fixture(params=["queue", "stream"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """A Redis as shipped, with a worker. If decisions go to a stream, it is another server, and a group reads the stream."""
    another = shutil.which("redis-server") if request.param == "stream" else None
    server = Shipped(tmp_path, another or default_server(), more="maxmemory 1gb\n")
    try:
        opened = Fleet(server, tmp_path, request.param)
        with (
            at_work(opened.settings["worker"], tmp_path),
            server.connect("operator") as operator,
        ):
            if request.param == "stream":
                operator.xgroup_create("decisions.accepted", "readers", id="0", mkstream=True)
            (tmp_path / "erased.txt").write_text(f"{opened.decided()}\n", "utf-8")
            server.refused()
            yield opened
    finally:
        server.stop()


def commands(*, reading_queues: bool) -> Iterator[Line]:
    """Yield the lines of the pages that are commands to run: those that read decisions from queues, or all others.

    An operator reads queues. The user `consumer` reads streams, as a member of a group.
    """
    for line in (line for page in PAGES for line in lines_of(page) if line.is_code and COMMAND.match(line.text.strip())):
        if line.text.strip().startswith("kp-scorer decisions ") == reading_queues:
            yield line


@pytest.mark.slow
def test_commands_on_the_operators_pages_work_as_described(fleet: Fleet) -> None:
    failed = {}
    reading_queues = fleet.settings["operator"].results.via == "queue"
    for line in commands(reading_queues=reading_queues):
        code, output = ran(fleet, line.text.strip())
        if code or REFUSED.search(output):
            failed[line.place] = (line.text.strip(), code, output[-500:])
    assert failed == {}
    assert fleet.server.refused() == []
    if reading_queues:
        assert (fleet.directory / "rejected.jsonl").read_text("utf-8").startswith('{"')


def ran(fleet: Fleet, text: str) -> tuple[int, str]:
    """Run a command as its user; return its exit code and its output."""
    settings = fleet.settings["operator"]
    line = fleet.filled(re.sub(r"\s+#.*", "", text))
    if re.fullmatch(r"kp-scorer [^|<>]*", line):
        done = command(settings, *line.split()[1:], stdin="y\n")
        return done.exit_code, done.output + repr(done.exception or "")
    url = fleet.server.url("administrator" if AS_ADMINISTRATOR in text else "operator")
    as_user = f'redis-cli() {{ "{redis_cli()}" --no-auth-warning -u "{url}" "$@"; }}\n'
    shell = run_in_shell(as_user + line, fleet.directory, **as_environment(settings))
    return shell.returncode, shell.stdout + shell.stderr
