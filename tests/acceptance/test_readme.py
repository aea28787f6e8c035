"""The README's commands, run in its order, print the output that it shows, and the how-to's make a training file."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil
import pytest
import redis
from kp_scorer.settings import load_settings
from kp_scorer.store import Store

from tests.support.changed_settings import settings_at
from tests.support.commands import run_in_shell, up
from tests.support.documents import blocks
from tests.support.paths import REFERENCE_TRACES, REPOSITORY
from tests.support.processes import free_port, opened, start_worker, wait_until
from tests.support.servers import answers, default_server
from tests.support.traces import new_id, rows_in

pytestmark = pytest.mark.slow

FIGURE: Final = re.compile(r"\d+(?:\.\d+)?")
TRACES: Final = 200
"""The number of real traces with which README's figures are measured."""

IN_ORDER: Final = {"KP_WORKER_CONCURRENCY": "1"}
"""A worker that decides one message at a time compares each trace with the same ones in every run, as for README's figures."""


def alike(expected: str, line: str) -> bool:
    """Return whether two lines have the same words, and the same figures except for what depends on the processor.

    Scores differ in the third digit between processors, so a trace next to its threshold may change sides: a count may differ
    by one in fifty.
    """
    return FIGURE.sub("", expected) == FIGURE.sub("", line) and all(
        float(actual) == pytest.approx(float(figure), abs=0.002 if "." in figure else int(figure) / 50)
        for figure, actual in zip(FIGURE.findall(expected), FIGURE.findall(line), strict=True)
    )


def assert_shown(expected: str, output: str) -> None:
    """Check that an output has README's lines in their order; an ellipsis stands for the rest of a line, or for any lines."""
    following = iter(output.splitlines())
    may_skip = True
    for line in expected.splitlines():
        if line.strip() == "…":
            may_skip = True
            continue
        beginning, elided, _ = line.partition("…")
        matches = (alike(beginning, each[: len(beginning)] if elided else each) for each in following)
        assert any(matches) if may_skip else next(matches, False), f"{line}\n\nis not where README has it in\n\n{output}"
        may_skip = False


def dialogue(block: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a block, each with the output that follows it."""
    for part in block.removeprefix("$ ").split("\n$ "):
        command, _, output = part.partition("\n")
        yield command, output


def test_a_first_result_shows_what_readme_shows(tmp_path: Path) -> None:
    (expected,) = (block for block in blocks("README.md") if block.lstrip().startswith("domain  "))
    samples = REPOSITORY / "worker" / "kp_scorer" / "samples" / "traces.jsonl"
    done = run_in_shell(f"kp-scorer keep {samples} --best 25% --output {tmp_path / 'kept.jsonl'}")
    assert done.returncode == 0, done.stderr
    assert_shown(expected, "\n".join(line.strip() for line in done.stderr.splitlines()))
    assert len(rows_in((tmp_path / "kept.jsonl").read_text("utf-8"))) == 12


def test_a_folder_of_sessions_becomes_a_file_that_trains_and_names_nobody(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("worker/HOWTO.md") if "~/.claude/projects" in block)
    make, install, keep = block.splitlines()
    assert (make, install) == ("python3 -m venv env", "env/bin/pip install '.[secrets]'")
    call = {"type": "tool_use", "id": "c", "name": "Bash", "input": {"command": "tide /home/ann/ports"}}
    turns = [
        ("user", "When is high water? Tell ann@example.org"),
        ("assistant", [{"type": "text", "text": "I look it up."}, call]),
        ("user", [{"type": "tool_result", "tool_use_id": "c", "content": "04:12"}]),
        ("assistant", [{"type": "text", "text": "At 04:12."}]),
    ]
    for session in range(5):
        file = tmp_path / ".claude" / "projects" / f"app-{session}" / "session.jsonl"
        file.parent.mkdir(parents=True)
        lines = [
            {
                "type": role,
                "uuid": f"{session}-{number}",
                "sessionId": f"s{session}",
                "message": {"role": role, "content": content},
            }
            for number, (role, content) in enumerate(turns)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_in_shell(keep.removeprefix("env/bin/"), tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (row,) = rows_in((tmp_path / "train.jsonl").read_text("utf-8"))
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(row["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"command": "tide /home/[USER_1]/ports"}
    assert "/ann" not in (tmp_path / "train.jsonl").read_text("utf-8")
    assert "1 rows from runs" in (tmp_path / "train.md").read_text("utf-8")


def test_a_demo_shows_what_readme_shows_and_leaves_nothing_behind() -> None:
    (expected,) = (block for block in blocks("README.md") if block.startswith("started an embedded Redis"))
    mark = new_id()
    done = run_in_shell("kp-scorer demo", MARK=mark)
    assert done.returncode == 0, done.stderr
    assert_shown(expected, done.stderr + done.stdout)
    # Children inherit the variable, so it finds even those that have left their process group.
    assert [process for process in psutil.process_iter(["environ"]) if mark in str(process.info["environ"])] == []


@pytest.mark.timeout(1800)
def test_readmes_way_to_thresholds_works_and_real_traces_get_the_references_scores(
    expected_scores: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (REFERENCE_TRACES / "traces.jsonl").read_text("utf-8").splitlines(keepends=True)[:TRACES]
    (tmp_path / "traces.jsonl").write_text("".join(lines), "utf-8")
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in blocks("README.md") if block.startswith("$ kp-scorer calibrate"))
    with ExitStack() as services:
        for command, expected in dialogue(block):
            _, *arguments = command.split()
            if arguments[0] == "up":
                services.enter_context(up(*arguments[1:], **IN_ORDER))
                continue
            done = run_in_shell(command)
            assert done.returncode == 0, done.stderr
            assert_shown(expected, done.stdout)
    states = rows_in((tmp_path / "states.jsonl").read_text("utf-8"))
    scores = {state["trace_id"]: state["decision"]["score"] for state in states}
    assert len(scores) == TRACES
    assert scores == pytest.approx({trace_id: expected_scores[trace_id] for trace_id in scores}, abs=0.001)


def test_doctor_finds_nothing_wrong_with_a_service_set_up_for_production_as_in_the_readme(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("README.md") if "kp-scorer reference redis.conf" in block)
    *files, server, worker = block.splitlines()
    run_in_shell("\n".join(files), tmp_path).check_returncode()
    users = tmp_path / "users.acl"
    users.write_text(re.sub(r"PASSWORD-OF-(\w+)", r">secret-of-\1", users.read_text("utf-8")), "utf-8")
    port = free_port()
    url, command = worker.removeprefix("KP_BROKER_URL=").split(" ", 1)
    assert (server, command) == ("redis-server redis.conf", "kp-scorer worker")
    url = url.replace("queue:6379", f"127.0.0.1:{port}").replace("PASSWORD", "secret-of-worker")
    with (
        (tmp_path / "redis.log").open("wb") as log,
        opened(default_server(), "redis.conf", "--port", str(port), cwd=tmp_path, stdout=log),
        redis.Redis.from_url(url) as client,
    ):
        wait_until(lambda: answers(client))
        of_operator = url.replace("worker", "operator")
        with (
            start_worker(load_settings({"broker.url": url}), tmp_path / "worker.log"),
            Store.open(settings_at(of_operator)) as store,
        ):
            # A ready worker reports within seconds, or later on a busy machine.
            wait_until(store.worker_reports)
            done = run_in_shell("kp-scorer doctor", KP_BROKER_URL=of_operator)
    findings = [(row["check"], row["detail"]) for row in rows_in(done.stdout) if row["state"] != "ok"]
    assert (done.returncode, findings) == (0, []), done.stderr
