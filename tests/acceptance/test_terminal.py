"""Commands that show what others sent show nothing that a terminal acts on."""

import json
import subprocess
from typing import Any, Final

from kp_scorer.characters import acts
from kp_scorer.settings import Settings, as_environment
from kp_scorer.store import Store

from tests.support.builders import minimal_payload, step
from tests.support.commands import run

ODD: Final = "a\x1b]0;owned\x07\x1b[2J\x7f\x9b31m\u202egnp.exe\u2028c"


def run_shown(*arguments: str, stdin: str = "", **variables: str) -> "subprocess.CompletedProcess[str]":
    found = run(*arguments, stdin=stdin, **variables)
    assert not any(acts(line) for line in (found.stdout + found.stderr).split("\n"))
    return found


def hostile_payloads() -> list[dict[str, Any]]:
    """Three traces, of which the last alone is one: with an odd id, an odd domain, and odd content."""
    return [
        minimal_payload(trace_id=f"kp:trace:{ODD}"),
        minimal_payload(domain=ODD),
        minimal_payload(objective=ODD, steps=[step("thought", ODD, content=ODD, input={ODD: ODD})]),
    ]


def test_score_tells_of_odd_traces_without_showing_them() -> None:
    lines = [json.dumps(payload, ensure_ascii=False) for payload in hostile_payloads()]
    lines += [ODD.replace("\u2028", ""), f'{{"{ODD}": 1']
    found = run_shown("score", "--embedder", "none", "-", stdin="\n".join(lines))
    states = [json.loads(line).get("state", "decided") for line in found.stdout.splitlines()]
    assert states == ["invalid", "invalid", "decided", "invalid", "invalid"]
    assert "line 2: metadata.task_domain: expected no control" in found.stderr


def test_dead_letters_show_what_was_sent_with_every_odd_character_escaped(settings: Settings, store: Store) -> None:
    # Half a character is no JSON that every program reads.
    texts = [ODD, '"\\ud800"']
    sent = [*(json.dumps(payload, ensure_ascii=False) for payload in hostile_payloads()), *texts]
    for text in sent:
        store.dead_letters.bury(text.encode(), "malformed", "body: expected JSON")
    found = run_shown("dead-letter", "show", **as_environment(settings))
    shown = [json.loads(line)["payload"] for line in found.stdout.splitlines()]
    for text in sent:
        assert (text if text in texts else json.loads(text)) in shown
