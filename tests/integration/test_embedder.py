"""The default model keeps its promises. The README's test scores the real traces; other models are tested with the engines."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from kp_scorer import score_traces
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding.embedder import Embedder
from kp_scorer.limits import Limits
from kp_scorer.novelty import MemoryLog
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.report.explanation import decided_words
from kp_scorer.scoring import Policy
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import NoveltySettings, UnreadableAction
from kp_scorer.store.records import MemoryLedger

from tests.support.builders import load_embedder, make_trace, step
from tests.support.processes import output_of
from tests.support.traces import fresh_samples, jsonl


@pytest.fixture(scope="module")
def openvino() -> Embedder:
    return load_embedder(embedder="openvino")


TEXTS: Final = ["refund a double charge", "tree " * 600]
HEAVY: Final = ("torch", "transformers", "sentence_transformers")
LOAD_AND_TELL: Final = f"""
import json, sys
from kp_scorer.embedding.select import select_embedder
from kp_scorer.settings.sections import EmbeddingSettings
embedder = select_embedder(EmbeddingSettings())
vectors = embedder and embedder.embed({TEXTS!r}).tolist()
print(json.dumps({{"engine": embedder and embedder.engine, "vectors": vectors}}))
"""


def test_the_default_model_needs_no_torch_and_leaves_nothing(
    openvino: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))")
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    done = subprocess.run([sys.executable, "-B", "-c", LOAD_AND_TELL], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded["engine"].startswith("openvino")
    assert np.array_equal(np.array(loaded["vectors"], np.float32), openvino.embed(TEXTS))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["sitecustomize.py"]


def test_a_decision_says_how_many_tokens_were_embedded_and_how_many_there_are(openvino: Embedder) -> None:
    short, long = fresh_samples(2)
    short["task"]["objective"], short["steps"] = "tree", [{"step_id": 0, "type": "thought"}]
    long["task"]["objective"] = "tree " * 600
    window = NoveltySettings().window()
    decider = Decider(MemoryLedger(), Policy(), NoveltyMeter(openvino, MemoryLog(window), window), max_attempts=5)
    by_model = decider.decide([decode_trace(trace, Limits()) for trace in (short, long)])
    by_others = [score_traces([short, long], load_settings({"embedding.embedder": name})) for name in ("none", "words")]
    decided = [each for each in chain(by_model, *by_others) if isinstance(each, Decision)]
    counts = [(each.novelty.embedded_tokens, each.novelty.unknown_tokens, each.novelty.text_tokens) for each in decided]
    assert counts == [(3, 0, 3), (512, 0, None), *[(None, None, None)] * 4]


FORKING: Final = """
import json, multiprocessing, sys, warnings
from kp_scorer import KeptRuns, Scorer
from kp_scorer.errors import EmbedderUnhealthy

warnings.simplefilter("ignore")
path = sys.argv[1]
first, second = map(json.loads, sys.argv[2:])
scorer, kept = Scorer(), KeptRuns(path)
scorer.score(first)
kept.similar("a task")

def score():
    try:
        return scorer.score(second).novelty.source
    except EmbedderUnhealthy as error:
        return str(error)

def similar():
    try:
        return len(kept.similar("a task"))
    except EmbedderUnhealthy as error:
        return str(error)

with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.apply_async(score).get(60))
    print(pool.apply_async(similar).get(60))
print(scorer.score(second).novelty.source)
"""


LOADED_BEFORE: Final = "embedder: it was loaded before this process was forked"


@pytest.mark.parametrize(
    ("embedder", "in_child"), [("openvino", (LOADED_BEFORE, LOADED_BEFORE)), ("words", ("embedding", "1"))]
)
def test_scorers_made_before_a_fork_answer_in_the_child(embedder: str, in_child: tuple[str, str], tmp_path: Path) -> None:
    first, second = fresh_samples(2)
    kept = tmp_path / "kept.jsonl"
    kept.write_text(jsonl(first | {"metadata": first["metadata"] | {"success": True}}), "utf-8")
    arguments = [sys.executable, "-c", FORKING, str(kept), *map(json.dumps, (first, second))]
    output = output_of(*arguments, env=os.environ | {"KP_EMBEDDING_EMBEDDER": embedder}, timeout=300)
    scored, similar, parent = output.splitlines()
    assert (scored.startswith(in_child[0]), similar.startswith(in_child[1]), parent) == (True, True, "embedding")


UNKNOWN_SCRIPT: Final = ("จองตั๋วราคาถูกที่สุด", "รดน้ำต้นไม้ทุกวัน")
"""Unrelated tasks in Thai, of which the default model knows no word."""


def decided_by(embedder: Embedder, unreadable: UnreadableAction, *objectives: str) -> list[Decision]:
    window = NoveltySettings().window()
    meter = NoveltyMeter(embedder, MemoryLog(window), window, unreadable=unreadable)
    traces = [
        make_trace(objective=each, trace_id=f"kp:trace:{number}", steps=[step("observation")])
        for number, each in enumerate(objectives)
    ]
    decided = Decider(MemoryLedger(), Policy(min_novelty=0.1, threshold=0), meter, max_attempts=5).decide(traces)
    return [each for each in decided if isinstance(each, Decision)]


def test_a_script_that_the_model_does_not_know_is_reported_and_scored_anyway(
    openvino: Embedder, caplog: pytest.LogCaptureFixture
) -> None:
    _, second, third = decided_by(openvino, "score", *UNKNOWN_SCRIPT, "ตรวจสอบใบแจ้งหนี้")
    assert (second.novelty.source, second.outcome) == ("embedding", "rejected")
    assert second.dimensions.novelty == pytest.approx(0, abs=1e-4)
    assert (second.novelty.embedded_tokens, second.novelty.unknown_tokens, third.novelty.is_unreadable) == (3, 1, True)
    assert [record.message for record in caplog.records].count("text_unreadable") == 1
    assert "1 of its 3 tokens are words that the model does not know" in " ".join("\n".join(decided_words(second, {})).split())


def test_unreadable_texts_may_have_unknown_novelty_unless_they_are_copies(openvino: Embedder) -> None:
    _, second, copy, english = decided_by(openvino, "unknown", *UNKNOWN_SCRIPT, UNKNOWN_SCRIPT[1], "book a flight")
    assert (second.novelty.source, second.dimensions.novelty, second.outcome) == ("unreadable", 0.5, "accepted")
    assert (second.novelty.nearest, "embedding.embedder = words" in "".join(decided_words(second, {}))) == (None, True)
    assert (copy.novelty.duplicate_of, copy.dimensions.novelty) == ("kp:trace:1", 0)
    assert (english.novelty.source, english.novelty.unknown_tokens) == ("embedding", 0)


@pytest.mark.parametrize("text", [" ", "\u200b", "🙂 👍", "[REDACTED]", "[Redacted]", "<redacted> ({NAME_1}) ***"])
def test_a_text_without_words_repeats_only_its_copies(openvino: Embedder, text: str) -> None:
    for embedder in (openvino, load_embedder(embedder="words")):
        *_, wordless, copy = decided_by(embedder, "score", "book a flight", "…", text, text)
        assert (wordless.novelty.source, wordless.dimensions.novelty, wordless.outcome) == ("unreadable", 0.5, "accepted")
        assert (copy.novelty.duplicate_of, copy.dimensions.novelty) == ("kp:trace:2", 0)


def test_traces_whose_embedded_texts_are_equal_are_explained(openvino: Embedder) -> None:
    _, second = decided_by(openvino, "score", "tree " * 600, "tree " * 600 + "forest")
    explained = " ".join("\n".join(decided_words(second, {})).split())
    assert "both have the same 512 tokens, and what else they say is not read" in explained
