"""Checks run in a process of their own, which contains whatever they do, and their results change decisions as settings say."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from kp_scorer import Findings, Scorer
from kp_scorer.checks.asking import Checks
from kp_scorer.decider import Decider
from kp_scorer.decision import CheckResult, Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import SettingsError
from kp_scorer.report.explanation import decided_words, terms_of
from kp_scorer.report.phrases import why
from kp_scorer.scoring import Policy, decide_again
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import ChecksSettings
from kp_scorer.store.records import MemoryLedger
from pydantic import ValidationError

from tests.support.builders import LIMITS, changed, decided, make_trace, maximal_payload
from tests.support.own_checks import MARKER, NAMES, install
from tests.support.paths import REPOSITORY
from tests.support.planted import HOSTILE, PLACES, SECRETS
from tests.support.processes import opened, wait_until
from tests.support.traces import sample_traces

WITHOUT_EMBEDDER: Final = {"embedding.embedder": "none", "scoring.threshold": 0.0}
START_S: Final = 60
HERE: Final = entry_points(group="kp_scorer.checks").names
RESULT: Final = CheckResult(name="clinic", version="3.1", kinds={"name": 2}, outcome="review")

Open = Callable[..., Checks]


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", install(tmp_path_factory.mktemp("installed")))
        yield


@pytest.fixture
def open_checks() -> Iterator[Open]:
    """A function that loads an operator's own checks, each with the strictest outcome that it may demand."""
    with ExitStack() as stack:

        def load(timeout_s: float = 30.0, **own: str) -> Checks:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(ChecksSettings, "timeout_s", timeout_s)
            settings = load_settings({"checks.own": own})
            return stack.enter_context(closing(Checks(settings.checks)))

        yield load


@pytest.fixture(scope="module")
def strict() -> Iterator[Checks]:
    with closing(Checks(load_settings({"checks.own": {"misbehave": "reject", "count_steps": "note"}}).checks)) as checks:
        yield checks


@pytest.fixture(scope="module")
def secrets() -> Iterator[Checks]:
    # Loading and running the check may take longer than the default timeout on a busy machine.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChecksSettings, "timeout_s", 60.0)
        checks = Checks(load_settings({"checks.secrets": "reject"}).checks)
    with closing(checks):
        yield checks


def test_a_check_sees_the_trace_and_its_findings_come_back_with_its_version(strict: Checks) -> None:
    for trace in (decode_trace(maximal_payload(), LIMITS), make_trace(steps=[{"step_id": 0, "type": "thought"}])):
        _, counted = strict.run(trace)
        assert counted == CheckResult(
            name="count_steps", version="3.1", kinds={"step": len(trace.steps)}, numbers={"mean_chars": 12.5}
        )


def test_settings_bound_what_a_check_may_demand(open_checks: Open) -> None:
    noting, reviewing = open_checks(misbehave="note"), open_checks(misbehave="review")
    asked = ((noting, "be kind"), (reviewing, "be kind"), (noting, "raise this"))
    results = [result for checks, objective in asked for result in checks.run(make_trace(objective=objective))]
    assert [(each.outcome, each.failure) for each in results] == [(None, None), ("review", None), (None, "error")]


@pytest.mark.parametrize("objective", ["raise", "exit", "leave", "eat", "quote", "infinite", "many", "nothing"])
def test_a_failed_check_is_noted_and_demands_review_and_the_next_trace_is_checked(
    strict: Checks, objective: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    failed, counted = strict.run(make_trace(objective=f"{objective} this secret text"))
    assert failed == CheckResult(name="misbehave", version="3.1", failure="error", outcome="review")
    assert (counted.failure, counted.kinds) == (None, {"step": 2})
    (harmless, _) = strict.run(make_trace())
    assert (harmless.failure, harmless.outcome) == (None, "rejected")
    (event,) = map(vars, caplog.records)
    assert (event["msg"], event["check"]) == ("check_failed", "misbehave")
    # Stdout stays empty, because programs that use the package write their own output there.
    assert [text for text in (MARKER, "secret text", "check_failed") if text in f"{event['detail']} {capfd.readouterr()}"] == []


def test_an_endless_check_ends_in_time_with_its_process(open_checks: Open) -> None:
    checks = open_checks(0.3, misbehave="reject", look_around="note")
    before = checks.run(make_trace())[1].numbers["pid"]
    started = time.monotonic()
    endless, after = checks.run(make_trace(objective="loop"))
    assert time.monotonic() - started < START_S
    assert endless == CheckResult(name="misbehave", version="3.1", failure="timeout", outcome="review")
    assert after.numbers["pid"] != before
    assert not psutil.pid_exists(int(before))


def test_the_child_of_a_check_that_forks_answers_no_question(strict: Checks) -> None:
    results = [strict.run(make_trace(objective=word)) for word in ("fork", "raise", "be kind", "raise")]
    assert [[each.failure for each in checked] for checked in results] == [[None, None], ["error", None]] * 2


_FORKING: Final = """
import os, sys
from kp_scorer.checks.asking import Checks
from kp_scorer.settings import load_settings
from tests.support.builders import make_trace
checks = Checks(load_settings({"checks.own": {"count_steps": "note"}}).checks)
first = os.fork()
steps = 1 if first else 3
trace = make_trace(steps=[{"step_id": number, "type": "thought"} for number in range(steps)])
wrong = sum(checks.run(trace)[0].kinds != {"step": steps} for _ in range(100))
if first:
    wrong += os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
os._exit(min(wrong, 100))
"""


def test_processes_that_fork_get_the_answers_to_their_own_questions() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKING], cwd=REPOSITORY, timeout=120, check=False)
    assert done.returncode == 0


def test_a_check_knows_no_settings(open_checks: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_REDIS_URL", "redis://:password@127.0.0.1/0")
    monkeypatch.setenv("kp_broker_url", "redis://:password@127.0.0.1/0")
    (result,) = open_checks(look_around="note").run(make_trace())
    assert result.kinds == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "nobody",
            # Other entry points that are installed here are listed, too.
            f"checks: nobody: expected one entry point of this name, got 0; there are {sorted([*HERE, *NAMES, 'broken'])}",
        ),
        ("versioned", "checks: versioned: version: expected a text of 1 to 64 characters of ASCII without spaces"),
        ("broken", "checks: broken cannot be loaded: ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
    ],
)
def test_checks_that_cannot_be_loaded_are_an_error_at_the_start(name: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Scorer(load_settings({**WITHOUT_EMBEDDER, "checks.own": {name: "note"}}))
    assert str(caught.value) == expected


def test_without_its_extra_the_check_for_secrets_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kingfisher_sdk.py").write_text("raise ImportError\n", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SettingsError, match=r"secrets needs its extra: pip install 'kp-scorer\[secrets\]'"):
        Checks(load_settings({"checks.secrets": "note"}).checks)


ORPHANING: Final = """
import time
from kp_scorer.checks.asking import Checks
from kp_scorer.settings import load_settings
from tests.support.builders import make_trace

checks = Checks(load_settings({"checks.own": {"look_around": "note"}}).checks)
print(int(checks.run(make_trace())[0].numbers["pid"]), flush=True)
time.sleep(60)
"""


def test_an_idle_process_ends_with_a_parent_that_is_killed() -> None:
    with opened(sys.executable, "-c", ORPHANING, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_process_that_is_killed_while_idle_costs_no_check(open_checks: Open) -> None:
    checks = open_checks(look_around="reject")
    (before,) = checks.run(make_trace())
    child = psutil.Process(int(before.numbers["pid"]))
    child.kill()
    wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    (after,) = checks.run(make_trace())
    assert (after.failure, after.outcome) == (None, before.outcome)


@pytest.mark.parametrize("fields", [{"kinds": {"A": 1}}, {"kinds": {"a b": 1}}, {"kinds": {"x" * 65: 1}}, {"kinds": {"a": -1}}])
def test_findings_hold_counts_by_plain_names_alone(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Findings(**fields)


def test_the_privacy_level_chooses_the_handling_of_secrets() -> None:
    checks = load_settings(
        {"checks.secrets_by_privacy": {"aggregated": "reject", "private": "note"}, "checks.own": {"a": "note"}}
    )
    assert [checks.checks.allowed(level) for level in ("aggregated", "federated", "private")] == [
        {"a": None, "secrets": "rejected"},
        {"a": None},
        {"a": None, "secrets": None},
    ]
    assert checks.checks.names == ("a", "secrets")


def token() -> str:
    return SECRETS["GitHub token"](random.Random(1))


def result_of(secrets: Checks, path: str, value: object) -> CheckResult:
    """Return what the check for secrets finds in a trace that has every field, with ``value`` at ``path``."""
    payload = changed(maximal_payload(), "task.input_schema", {"properties": {"note": {}}})
    (result,) = secrets.run(decode_trace(changed(payload, path, value), LIMITS))
    return result


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_seen_in_every_field(secrets: Checks, place: str) -> None:
    clean = result_of(secrets, place, "nothing in it")
    assert (clean.kinds, clean.outcome) == ({}, None)
    result = result_of(secrets, place, f"in it: {token()} and more")
    assert (result.kinds["github-pat"], result.outcome, result.failure) == (1, "rejected", None)


def test_secrets_are_found_in_names_and_nested_lists_and_passwords_by_their_name(secrets: Checks) -> None:
    for value in [[[{token(): [None, True]}]], {token(): {}}, [[[[f"x {token()}"]]]]]:
        assert result_of(secrets, "steps.0.input", {"rows": value}).kinds["github-pat"] >= 1
    assert result_of(secrets, "steps.0.input", {"user": "admin", "password": "x7Kq2mPz9w"}).kinds == {"assigned": 1}


@pytest.mark.parametrize("end", ["", ",", "."])
@pytest.mark.parametrize("kind", SECRETS)
def test_kinds_of_secrets_are_found_in_the_middle_of_a_text(secrets: Checks, kind: str, end: str) -> None:
    chance = random.Random(kind)
    texts = [f"Then I saw {SECRETS[kind](chance)}{end} and went on." for _ in range(10)]
    results = [secrets.run(make_trace(objective=text, trace_id=f"kp:trace:{number}")) for number, text in enumerate(texts)]
    assert sum(bool(result.kinds) for (result,) in results) >= 7


@pytest.mark.parametrize("kind", ["Slack webhook", "Azure storage key", "password in an HTTPS URL"])
def test_kinds_of_secrets_with_escaped_slashes_are_the_same(secrets: Checks, kind: str) -> None:
    text = f'It read {{"note": "{SECRETS[kind](random.Random(kind))}"}}.'
    kinds = result_of(secrets, "task.objective", text).kinds
    assert kinds == result_of(secrets, "task.objective", text.replace("/", r"\/")).kinds != {}


def test_shipped_traces_hold_no_secrets(secrets: Checks) -> None:
    kinds = [secrets.run(decode_trace(trace, LIMITS))[0].kinds for trace in sample_traces()]
    assert kinds == [{}] * len(kinds)


@pytest.mark.parametrize("filler", HOSTILE)
def test_a_hostile_text_costs_no_more_than_its_length(secrets: Checks, filler: str) -> None:
    text = filler * (90_000 // (len(json.dumps(filler)) - 2))
    trace = make_trace(steps=[{"step_id": number, "type": "thought", "content": text} for number in range(11)])
    (result,) = secrets.run(trace)
    assert result.failure is None


def test_a_long_name_of_many_values_costs_no_more_than_the_values(secrets: Checks) -> None:
    result = result_of(secrets, "steps.0.input", {"n" * 90_000: [0] * 9_000})
    assert (result.failure, result.kinds) == (None, {})


def test_a_decision_holds_kinds_and_counts_and_no_secret(secrets: Checks) -> None:
    decider = Decider(MemoryLedger(), Policy(threshold=0.0), None, max_attempts=5, checks=secrets)
    (decision,) = decider.decide([make_trace(objective=f"use {token()}")])
    assert isinstance(decision, Decision)
    assert (decision.outcome, decision.is_guarded, decision.checks[0].kinds) == ("rejected", True, {"github-pat": 1})
    message = decision.model_dump_json()
    assert token() not in message
    assert Decision.model_validate_json(message) == decision
    assert decide_again(decision, Policy(threshold=0.0)).outcome == "rejected"


def test_scoring_offline_checks_by_the_settings() -> None:
    scorer = Scorer(load_settings({**WITHOUT_EMBEDDER, "checks.own": {"misbehave": "review"}}))
    decision = scorer.score(make_trace())
    assert (decision.outcome, decision.checks) == ("review", (CheckResult(name="misbehave", version="3.1", outcome="review"),))


def test_an_explanation_names_the_check_and_nothing_makes_the_trace_pass() -> None:
    decision = decided(make_trace(), Policy(threshold=0.0)).model_copy(update={"checks": (RESULT,), "outcome": "review"})
    lines = list(decided_words(decision, {}))
    assert lines[1] == "The check clinic found 2 name, and demands review."
    assert {term.least for term in terms_of(decision)} == {None}
    assert why(decision).startswith("check clinic, ")
    failed = RESULT.model_copy(update={"kinds": {}, "failure": "timeout"})
    assert list(decided_words(decision.model_copy(update={"checks": (failed,)}), {}))[1] == (
        "The check clinic failed (timeout), and demands review."
    )
