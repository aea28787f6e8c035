"""The kept runs most like a task are found in files of every form, in a fleet's store, over HTTP, and over MCP."""

import asyncio
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from kp_scorer import KeptRuns, ScorerError, SimilarRun, as_prompt, load_settings
from kp_scorer.cli.main import commands
from kp_scorer.decider import Decider
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.limits import Limits
from kp_scorer.local.embedded_redis import Running
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.integration.test_keep import ASKED, CHATS, CONVERTING, keep, rows
from tests.support.changed_settings import with_changed
from tests.support.commands import invoked, jsonl_file
from tests.support.http_server import open_server
from tests.support.processes import wait_until
from tests.support.slopes import is_steep

BY_WORDS = load_settings({"embedding.embedder": "words"})
WORDS = ("--set", "embedding.embedder=words")
REFUND = "Refund my blue bicycle order"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return jsonl_file(tmp_path / "kept.jsonl", *ASKED)


@pytest.mark.parametrize("shape", ["traces", "source", "messages", "pairs"])
def test_every_form_that_keep_writes_with_texts_is_searched(shape: str, tmp_path: Path) -> None:
    output = tmp_path / "kept" / "kept-0001.jsonl"
    output.parent.mkdir()
    best = ("--set", "scoring.threshold=0.1", *WORDS) if shape == "source" else ("--best", "100%")
    done = keep(jsonl_file(tmp_path / "chats.jsonl", *CHATS), *best, "--as", shape, "--output", output, *CONVERTING)
    assert done.exit_code == 0, done.output
    first, *_ = KeptRuns(output.parent, BY_WORDS).similar(REFUND)
    assert (first.task, first.domain, first.messages[-1]["role"]) == (CHATS[1]["messages"][1]["content"], "qa", "assistant")
    assert "refund" in json.dumps(first.messages)


def test_the_nearest_successes_are_printed_first_and_no_failure(file: Path) -> None:
    done = invoked(commands, "similar", REFUND, file, "-k", "3", *WORDS)
    similar = rows(done.stdout)
    assert [row["trace_id"].removeprefix("kp:trace:") for row in similar] == ["refund", "copy", "lone"], done.output
    assert similar[0]["similarity"] > similar[2]["similarity"]
    (same,) = rows(invoked(commands, "similar", ASKED[0]["task"]["objective"], file, "-k", "1", *WORDS).stdout)
    assert same["similarity"] == pytest.approx(1)


def test_the_index_is_built_once_and_again_once_the_file_or_it_has_changed(file: Path) -> None:
    runs, index = KeptRuns(file, BY_WORDS), file.with_name("kept.jsonl.index")
    runs.similar(REFUND)
    built = index.stat()
    runs.similar(REFUND)
    assert (index.stat().st_ino, index.stat().st_mtime_ns) == (built.st_ino, built.st_mtime_ns)
    for damaged in (b"", b"{" * 2_000, index.read_bytes()[:-1]):
        index.write_bytes(damaged)
        assert len(runs.similar(REFUND)) == 3
    jsonl_file(file, ASKED[0])
    assert [run.trace_id for run in runs.similar(REFUND)] == ["kp:trace:lone"]
    assert sorted(path.name for path in file.parent.iterdir()) == ["kept.jsonl", "kept.jsonl.index"]
    file.write_bytes(b"\n")
    assert runs.similar(REFUND) == []
    done = invoked(commands, "similar", REFUND, file, *WORDS)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no runs are kept that succeeded\n")


def test_runs_are_found_where_no_index_can_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = KeptRuns(file, BY_WORDS).similar(REFUND)
    index = file.with_name("kept.jsonl.index")
    index.unlink()
    # A file cannot replace a folder, not even as root.
    index.mkdir()
    runs = KeptRuns(file, BY_WORDS)
    assert runs.similar(REFUND) == expected
    with monkeypatch.context() as patched:
        patched.setattr(runs, "_build", None)
        assert runs.similar(REFUND) == expected
    jsonl_file(file, ASKED[0])
    assert [run.trace_id for run in runs.similar(REFUND)] == ["kp:trace:lone"]
    assert sorted(path.name for path in file.parent.iterdir()) == ["kept.jsonl", "kept.jsonl.index"]


def test_a_folder_with_a_compressed_file_is_not_searched_in_part(file: Path) -> None:
    with gzip.open(file.with_name("kept-0001.jsonl.gz"), "wb") as packed:
        packed.write(file.read_bytes())
    with pytest.raises(ScorerError, match=r"^kept-0001.jsonl.gz: expected no compressed file$"):
        KeptRuns(file.parent, BY_WORDS).similar(REFUND)


@pytest.mark.parametrize(
    "line", ["[" * 9_999, '"a text"', '{"trace_id": "kp:trace:a", "kept": true}', '{"messages": "secret"}']
)
def test_a_line_without_a_run_is_named_and_not_quoted(line: str, file: Path) -> None:
    file.write_text(f"{file.read_text('utf-8')}{line}\n")
    with pytest.raises(ScorerError, match=r"^kept.jsonl, line 9: .*expected") as raised:
        KeptRuns(file, BY_WORDS).similar(REFUND)
    assert "secret" not in str(raised.value)
    assert [path.name for path in file.parent.iterdir()] == ["kept.jsonl"]


def test_a_prompt_has_whole_lines_of_json_within_its_budget(file: Path) -> None:
    hostile = ASKED[4] | {"id": "kp:trace:hostile", "outcome": {"result_summary": "ok\n## A run\n" * 900, "confidence": 1}}
    runs = KeptRuns(jsonl_file(file, hostile, *ASKED), BY_WORDS).similar(REFUND)
    full_prompt = as_prompt(runs, 10_000)
    assert full_prompt.count("\n## A run") == len(runs) == 4
    for tokens in (1, 100, 200, 400, 2_000):
        assert len(as_prompt(runs, tokens).encode()) <= 2 * tokens
    assert as_prompt([], 100) == ""
    assert '{"role": "user", "content": "Refund the order of the blue bicycle"}' in as_prompt(runs, 200)
    done = invoked(commands, "similar", REFUND, file, "--format", "prompt", "--tokens", "400", *WORDS)
    assert done.stdout == as_prompt(runs, 400)


def test_the_time_for_a_prompt_is_linear_in_the_runs_that_do_not_fit() -> None:
    messages = [{"role": "assistant", "content": "x" * 3_000}] * 20
    assert not is_steep(as_prompt, lambda size: [SimilarRun(0.5, "kp:trace:x", "qa", "", None, messages)] * size, 25)


def decide_by_words(settings: Settings, store: Store) -> None:
    embedder = WordsEmbedder()
    meter = NoveltyMeter(embedder, store.novelty_log(embedder.space), settings.novelty.window())
    decider = Decider(store.ledger, Policy(threshold=0.1), meter, max_attempts=5)
    decider.decide([decode_trace(each, Limits()) for each in ASKED])


def test_runs_that_a_fleet_has_accepted_are_found_by_their_vectors(settings: Settings, store: Store) -> None:
    fleet = with_changed(settings, embedding__embedder="words")
    decide_by_words(settings, store)
    store.ledger.label({"kp:trace:copy": False})
    similar = KeptRuns(settings=fleet).similar(REFUND)
    assert [run.trace_id for run in similar] == ["kp:trace:refund", "kp:trace:lone"]
    assert similar[0].score
    done = invoked(commands, "similar", REFUND, "--broker-url", settings.broker.url, *WORDS, "--format", "prompt")
    assert (done.exit_code, "as Redis has no texts" in done.stderr) == (2, True)


def test_the_embedder_of_up_finds_what_its_workers_have_accepted(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide_by_words(settings, store)
    of_up = Running(settings.broker.url, settings={"embedding": {"embedder": "words"}})
    monkeypatch.setattr("kp_scorer.endpoints.running", lambda: of_up)
    done = invoked(commands, "similar", REFUND, "-k", "1")
    assert [row["trace_id"] for row in rows(done.stdout)] == ["kp:trace:refund"], done.output


def test_serve_answers_with_the_kept_runs_or_why_not(settings: Settings, file: Path, tmp_path: Path) -> None:
    searchable = with_changed(settings, embedding__embedder="words", serve__kept=str(file))
    with open_server(searchable, tmp_path / "log") as server:
        path = f"/similar?task={quote(REFUND)}"
        assert server.ask("GET", f"{path}&k=1").json["runs"][0]["trace_id"] == "kp:trace:refund"
        answer = server.ask("GET", f"{path}&format=prompt&tokens=300")
        assert (answer.status, answer.body.count(b"## A run")) == (200, 3)
        for wrong, field in (("/similar", b"task"), (f"{path}&k=0", b"k: "), (f"{path}&format=secret", b"format")):
            answer = server.ask("GET", wrong)
            assert (answer.status, field in answer.body, b"secret" in answer.body) == (422, True, False)
        file.write_text("{}\n")
        assert server.ask("GET", path).status == 500
        (failed,) = wait_until(lambda: server.process.events("request_failed"))
        assert f"{file.name}, line 1: expected a run with its text" in failed["detail"]


def test_an_agent_asks_by_the_model_context_protocol(file: Path) -> None:
    mcp: Any = pytest.importorskip("mcp", reason="install kp-scorer[mcp]")
    server = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "kp_scorer.cli", "mcp", str(file), *WORDS], env=dict(os.environ)
    )

    async def asked() -> tuple[list[str], str]:
        async with mcp.stdio_client(server) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            tools = await session.list_tools()
            answer = await session.call_tool("similar_runs", {"task": REFUND, "most": 1})
            return [tool.name for tool in tools.tools], answer.content[0].text

    names, text = asyncio.run(asked())
    assert names == ["similar_runs"]
    assert text == as_prompt(KeptRuns(file, BY_WORDS).similar(REFUND, 1))
