"""The examples for stacks of agents, with the versions that they name and the variables of SERVE.md; the model is scripted."""

import os
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest
import redis
from kp_scorer.client import read_decisions
from kp_scorer.settings import Settings
from kp_scorer.store.keys import Keys

from tests.stacks.scripted_model import ANSWER, scripted_model
from tests.support.changed_settings import with_changed
from tests.support.documents import code_with
from tests.support.http_server import open_server
from tests.support.paths import REPOSITORY
from tests.support.processes import at_work, output_of, wait_until

pytestmark = [pytest.mark.stacks, pytest.mark.slow, pytest.mark.timeout(1_800)]

EXAMPLES: Final = REPOSITORY / "deploy" / "examples" / "agents"
BUILT: Final = REPOSITORY / "build" / "stacks"
INSTALL_S: Final = 900
TOKEN: Final = "a-token-of-this-test"
FRAMEWORKS: Final = {
    "google_adk.py": "google-adk",
    "langchain_agent.py": "langchain",
    "openai_agents.py": "openai_agents",
    "openai_sdk.py": "openai",
    "pydantic_ai_agent.py": "pydantic-ai",
    "vercel_ai_sdk.mjs": "ai-sdk",
}


def installed(example: Path) -> list[str]:
    """Return the command that runs an example; for one in Python, uv installs the packages that its header names."""
    if example.suffix == ".py":
        return ["uv", "run", "--python", sys.executable, "--script", str(example)]
    folder = BUILT / "node"
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("package.json", example.name):
        shutil.copy(EXAMPLES / file, folder)
    output_of("npm", "install", "--no-audit", "--no-fund", "--loglevel=error", cwd=folder, timeout=INSTALL_S)
    return ["node", str(folder / example.name)]


def variables(server: str, model: str) -> dict[str, str]:
    """Return the variables that the page shows, and those that lead to the model."""
    lines = code_with("OTEL_EXPORTER_OTLP_ENDPOINT").replace("TOKEN", TOKEN).splitlines()
    listed = dict(line.split("=", 1) for line in lines)
    urls = dict.fromkeys(("OPENAI_BASE_URL", "GOOGLE_GEMINI_BASE_URL"), model)
    own = {"OTEL_EXPORTER_OTLP_ENDPOINT": server, "UV_CACHE_DIR": str(BUILT / "uv")}
    switch = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    return listed | urls | own | switch | dict.fromkeys(("OPENAI_API_KEY", "GOOGLE_API_KEY"), "none")


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.[pm][yj]*")), ids=lambda path: path.name)
def test_example_is_one_decided_run(
    example: Path, settings: Settings, redis_client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    traced = with_changed(settings, results__with_trace=True)
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN, "utf-8")
    with (
        scripted_model() as model,
        at_work(traced, tmp_path),
        open_server(traced, tmp_path / "server.log", serve__tokens=str(tokens)) as server,
    ):
        printed = output_of(*installed(example), env=os.environ | variables(server.url, model), timeout=INSTALL_S)
        wait_until(lambda: redis_client.zcard(keys.runs) == redis_client.zcard(keys.pending) == 0)
    assert ANSWER in printed
    (decision,) = read_decisions(follow=False, settings=traced)
    assert (decision.domain, decision.agent_id, decision.framework) == ("code", "tide-agent", FRAMEWORKS[example.name])
    trace = decision.trace or {}
    assert (trace["metadata"]["success"], trace["outcome"]["confidence"]) == (True, 0.8)
    assert trace["task"]["objective"] == "When is high water at Esbjerg today?"
    assert [(step["type"], step["content"]) for step in trace["steps"]] == [
        ("tool_call", 'tide_table({"port": "Esbjerg"})'),
        ("observation", "High water at Esbjerg: 04:12 and 16:40"),
        ("thought", ANSWER),
    ]
