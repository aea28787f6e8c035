"""The sources of settings, their precedence, and the values that are refused."""

import re
import tomllib
from pathlib import Path
from typing import Any, Final, get_args
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decision import Outcome
from kp_scorer.errors import SettingsError
from kp_scorer.scoring import PROFILES
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.loading import as_environment, load_scoring

from tests.support.paths import REPOSITORY

OWN_PROFILE: Final = "{complexity = 0.1, novelty = 0.2, tool_diversity = 0.3, outcome_confidence = 0.4}"


def written(directory: Path, text: str) -> Path:
    path = directory / "scorer.toml"
    path.write_text(text, "utf-8")
    return path


def test_flags_win_over_variables_these_over_a_named_file_and_that_over_kp_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (named := tmp_path / "named.toml").write_text("[novelty]\nmax_elements = 20\nttl_s = 70\n[log]\nlevel = 'error'\n")
    monkeypatch.setenv("KP_CONFIG", str(written(tmp_path, "[log]\nlevel = 'warning'\n[scoring]\nthreshold = 0.4\n")))
    assert (load_settings().log.level, load_settings().scoring.threshold) == ("warning", 0.4)
    monkeypatch.setenv("KP_NOVELTY_MAX_ELEMENTS", "30")
    monkeypatch.setenv("KP_NOVELTY_TTL_S", "31")
    settings = load_settings({"novelty.max_elements": "40"}, named)
    assert (settings.novelty.max_elements, settings.novelty.ttl_s, settings.log.level) == (40, 31.0, "error")
    assert (settings.scoring, settings.novelty.recipe) == (Settings().scoring, Settings().novelty.recipe)


def test_domains_may_have_thresholds_reviews_or_none_profiles_and_aliases(tmp_path: Path) -> None:
    text = f"""[scoring]
        review = 0.6
        thresholds = {{code = 0.5}}
        reviews = {{code = 0.5, finance = 0.7, qa = 0.5}}
        aliases = {{financial_analysis = 'finance', 'Q & A' = 'qa', misc = 'default'}}
        profiles = {{'data eng' = {OWN_PROFILE}, code = {OWN_PROFILE}}}
    """
    policy = load_settings(config=written(tmp_path, text)).scoring
    assert policy.bounds("code").threshold == 0.5
    assert [policy.bounds(domain).review for domain in ("code", "finance", "else", "Q & A")] == [None, 0.7, 0.6, 0.5]
    assert [policy.profile(domain) for domain in ("data eng", "financial_analysis")] == ["data eng", "finance"]
    assert policy.profiles["code"].outcome_confidence == 0.4
    assert policy.profiles["finance"] == PROFILES["finance"]
    assert "misc" in policy.domains


WITHOUT_EFFECT: Final = {
    "review = 0.6\nthresholds = {code = 0.5}": "reviews.code: expected at most the threshold of 0.5, got 0.6",
    "review = 0.8\nthresholds = {law = 0.7}\nreviews = {tax = 0.77}": (
        "review: expected at most the threshold of 0.75, got 0.8; "
        "reviews.law: expected at most the threshold of 0.7, got 0.8; "
        "reviews.tax: expected at most the threshold of 0.75, got 0.77"
    ),
    "aliases = {code = 'finance'}": "aliases.code: expected a name without a profile or bounds of its own",
    "thresholds = {qa = 0.5}\naliases = {qa = 'finance'}": "aliases.qa: expected a name without a profile or bounds of its own",
    "aliases = {books = 'finanse'}": "aliases.books: expected a domain with a profile or bounds, got 'finanse'",
    "aliases = {books = 'money', money = 'finance'}": "aliases.books: expected a domain with a profile or bounds, got 'money'",
}
"""Entries of a policy that are refused, with the reason."""
ODD: Final = "co\u200bde"
INVISIBLE: Final = "expected no control, format or other invisible characters"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"[scoring]\n{text}", f"^scoring: {re.escape(where)}$") for text, where in WITHOUT_EFFECT.items()),
        (f"[scoring]\nthresholds = {{'{ODD}' = 0.5}}", rf"^scoring\.thresholds\.{ODD}: {INVISIBLE}$"),
        (f"[scoring]\nreviews = {{'{ODD}' = 0.5}}", rf"^scoring\.reviews\.{ODD}: {INVISIBLE}$"),
        (f"[scoring]\naliases = {{'{ODD}' = 'finance'}}", rf"^scoring\.aliases\.{ODD}: {INVISIBLE}$"),
        ("[novelty]\nmax_elments = 5\n", r"^novelty\.max_elments: "),
        ("[noveltea]\nmax_elements = 5\n", "^noveltea: "),
        ("max_elements = 5\n", "^max_elements: "),
        ("[scoring.profiles.code]\ncomplexity = 1.0\n", r"^scoring\.profiles\.code\.novelty: "),
        ("[scoring.thresholds]\ncode = 1.5\n", r"^scoring\.thresholds\.code: "),
        # With a share this small, the bar would accept ten times the share.
        ("[routing]\nshare = 0.001\n", r"^routing\.share: Input should be greater than or equal to 0\.005"),
        (
            f"[scoring.profiles]\ntravel = {OWN_PROFILE.replace('0.4', '0.5')}\n",
            r"scoring\.profiles\.travel: weights must sum to 1, these sum to 1\.1",
        ),
        ("[novelty]\nmax_elements = 0\n[log]\nlevel = 'loud'\n", r"novelty\.max_elements: .*log\.level: "),
    ],
)
def test_names_and_values_in_a_file_are_refused_each_with_its_reason(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(config=written(tmp_path, text))


def test_tables_of_several_sources_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kp.toml").write_text("[scoring.thresholds]\nmedical = 0.9\ncode = 0.5\n")
    monkeypatch.setenv("KP_SCORING_THRESHOLDS", '{"code": 0.6, "finance": 0.7}')
    settings = load_settings({"scoring.thresholds": {"finance": 0.8}}, tmp_path / "kp.toml")
    assert settings.scoring.thresholds == {"medical": 0.9, "code": 0.6, "finance": 0.8}


WRONG: Final = {
    "novelty.max_elements": ("many", "0"),
    "novelty.ttl_s": ("0", "nan"),
    "scoring.threshold": ("1.01", "-0.01", "nan"),
    "scoring.cap_step_term": ("perhaps",),
    "checks.secrets": ("loud",),
    "embedding.embedder": ("none-at-all",),
    "embedding.threads": ("-1",),
    "queues.message_bytes": ("0", "1" + "0" * 16),
    "log.level": ("INFO",),
    "queues.traces": ("two words", ""),
    "redis.prefix": ("{kp}", "x" * 65),
    "broker.visibility_timeout_s": ("2", "1" + "0" * 17),
    "queues.results_limit": ("0",),
    "results.via": ("topic", ""),
    "results.task": ("two words",),
    "broker.url": ("localhost:6379", "http://localhost"),
    "redis.url": ("amqp://localhost",),
    "worker.grace_s": ("1e17",),
    "ledger.ttl_s": ("1e-9",),
    "broker.timeout_s": ("1e7",),
    "worker.concurrency": ("10001",),
}
"""Wrong values by setting. Threads, sockets, Redis and AMQP bound the times and numbers that can be represented."""


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_value_is_refused_by_name_from_every_source(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=rf"^{name}: "):
        load_settings({name: value})
    monkeypatch.setenv("KP_" + name.replace(".", "_").upper(), value)
    with pytest.raises(SettingsError, match=rf"^{name}: "):
        load_settings()


@pytest.mark.parametrize(
    ("flags", "rings"),
    [
        ({}, ["decisions.rejected"]),
        ({"results.via": "stream"}, ["decisions.rejected"]),
        ({"results.via": "task", "results.task": "shop.decided"}, []),
    ],
)
def test_only_queues_of_nothing_but_rejected_decisions_are_rings(flags: dict[str, Any], rings: list[str]) -> None:
    settings = load_settings(flags)
    assert list(filter(settings.is_ring, dict.fromkeys(map(settings.queues.name, get_args(Outcome))))) == rings


def test_a_list_is_json_in_variables_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_RESULTS_PUBLISH", '["review", "accepted"]')
    assert load_settings().results.publish == ("review", "accepted")
    monkeypatch.setenv("KP_RESULTS_PUBLISH", "accepted")
    with pytest.raises(SettingsError, match=r"^KP_RESULTS_PUBLISH: expected JSON"):
        load_settings()


@pytest.mark.parametrize(
    ("flags", "is_reviewed"),
    [
        ({}, False),
        ({"checks.secrets": "note"}, False),
        ({"checks.own": {"clinic": "note"}}, False),
        ({"checks.secrets": "review"}, True),
        ({"checks.own": {"clinic": "reject"}}, True),
        ({"checks.secrets_by_privacy": {"private": "reject"}}, True),
        *(
            ({"novelty.pinned": {"tasks": {"similarity": 0.9, "beyond": beyond}}}, beyond == "review")
            for beyond in ("reject", "note", "review")
        ),
    ],
)
def test_review_has_its_queue_where_something_may_go_there(flags: dict[str, Any], is_reviewed: bool) -> None:
    assert ("review" in load_settings(flags).kinds) == is_reviewed


OF_WORKERS: Final = ("kp:pending", "kp:trace:1", "decisions.review.unacknowledged", "decisions.rejected.oversized")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"results.via": "task"}, "^results: task: expected the name of the task to call"),
        ({"results.publish": ["approved"]}, "^results.publish.0: "),
        ({"ledger.ttl_s": "59", "novelty.ttl_s": "60"}, "^ledger.ttl_s: expected at least novelty.ttl_s"),
        ({"queues.traces": "decisions.accepted"}, "^queues: decisions: .*need other names"),
        ({"queues.traces": {"a": {}, "decisions.revised": {}}}, "^queues: decisions: .*need other names"),
        *(({"queues.traces": name}, "is the name of a key that workers use") for name in OF_WORKERS),
        ({"queues.decisions": "kp:decisions"}, "is the name of a key that workers use"),
        ({"checks.own": {"secrets": "note"}}, "^checks.own: secrets is set by checks.secrets"),
        ({"checks.own": {"A": "note"}}, "^checks.own.A: "),
        # A server that other machines can reach needs a token and TLS.
        ({"serve.host": "0.0.0.0"}, "^serve: host: other machines can reach it"),
        ({"serve.host": "0.0.0.0", "serve.tokens": "file"}, "^serve: host: other machines can reach it"),
        ({"serve.host": "server.example", "serve.behind_proxy": True}, "^serve: tokens: expected a file"),
        ({"serve.certificate": "file"}, "^serve: certificate, key: expected both"),
        ({"worker.remote_control": True}, "^worker.remote_control needs RabbitMQ"),
        ({"broker.url": "redis://127.0.0.1/0", "worker.remote_control": True}, "^worker.remote_control needs RabbitMQ"),
        ({"novelty.max_elments": "5"}, "^novelty"),
        ({"noveltea.max_elements": "5"}, "^noveltea"),
        ({"novelty.max_elements.x": "5"}, "^novelty"),
        ({"max_elements": "5"}, r"^max_elements: expected SECTION\.NAME"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_by_name(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(flags)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("KP_NOVELTY_MAX_ELMENTS", r"^novelty\.max_elments: "),
        ("KP_NOVELTEA_MAX_ELEMENTS", "^KP_NOVELTEA_MAX_ELEMENTS: no setting"),
        ("KP_NOVELTY", "^KP_NOVELTY: no setting"),
        ("KP_BROKER_TIMEOUT_S_FILE", r"^broker\.timeout_s_file: no setting"),
        ("KP_BROKER_URLS_FILE", r"^broker\.urls_file: no setting"),
        ("KP_BROKER_URL_FILES", r"^broker\.url_files: no setting"),
        ("KP_BROKER_FILE", r"^broker\.file: no setting"),
        ("KP_", "^KP_: no setting"),
    ],
)
def test_variable_that_is_no_setting_is_refused(variable: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "5")
    with pytest.raises(SettingsError, match=message):
        load_settings()


def test_scoring_of_another_file_wins_over_settings_and_leaves_the_rest_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KP_SCORING_THRESHOLD", "0.6")
    monkeypatch.setenv("KP_SCORING_CAP_STEP_TERM", "true")
    scoring_file = written(tmp_path, "[scoring]\nthreshold = 0.5\n[scoring.thresholds]\ncode = 0.4\n[log]\nlevel = 'error'\n")
    scoring = load_scoring(scoring_file, load_settings())
    assert (scoring.threshold, scoring.thresholds, scoring.cap_step_term) == (0.5, {"code": 0.4}, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[scoring]\nthreshold = 2\n", "scoring.threshold: "),
        ("[scoring]\n[log]\nlevel = 'loud'\n", "log.level: "),
        ("scoring = 5\n", "scorer.toml: scoring: expected a section of this name"),
        ("[scoring", "scorer.toml: "),
    ],
)
def test_scoring_of_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        load_scoring(written(tmp_path, text), Settings())


def test_larger_messages_may_hold_more_in_proportion() -> None:
    small, large = (load_settings({"queues.message_bytes": size}).limits for size in (1_000, 4 * 2**20))
    assert (small.message_bytes, small.steps, small.values) == (1_000, 2_000, 20_000)
    assert (large.steps, large.values, large.field_chars, large.depth) == (8_000, 80_000, 400_000, 32)


NAMES: Final = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
DOMAINS: Final = st.text("ab \u00e9\u65e5'\"[]", min_size=1, max_size=8)
CHOSEN: Final = st.fixed_dictionaries(
    {},
    optional={
        "broker.url": st.sampled_from(["", "redis://:pa%23ss@host:1/0", "amqps://user:pass@host//"])
        | NAMES.map(lambda name: f"amqp://u{quote(name, safe='')}:%3F@host/{quote(name, safe='')}"),
        "redis.url": st.sampled_from(["", "rediss://host", "redis+sentinel://a,b?primary=c"]),
        "broker.timeout_s": st.floats(0.001, 86_400),
        "queues.decisions": st.from_regex(r"[A-Za-z0-9_.:-]{1,20}", fullmatch=True),
        "scoring.threshold": st.floats(0, 1),
        "scoring.thresholds": st.dictionaries(DOMAINS, st.floats(0, 1), max_size=3),
        "scoring.profiles": st.dictionaries(DOMAINS, st.just(PROFILES["medical"].model_dump()), max_size=2),
        "scoring.cap_step_term": st.booleans(),
        "novelty.max_elements": st.integers(1, 10**9),
        "embedding.model": NAMES | st.sampled_from(["5", "null", '"quoted"', "{}"]),
        "worker.concurrency": st.integers(1, 999),
    },
)


@given(CHOSEN)
def test_settings_pass_through_the_environment_unchanged(flags: dict[str, Any]) -> None:
    settings = load_settings(flags)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in as_environment(settings).items():
            patch.setenv(name, value)
        assert load_settings().model_dump() == settings.model_dump()


REFERENCE = REPOSITORY / "config" / "kp-scorer.toml"


@pytest.mark.parametrize(
    ("flags", "is_alike"),
    [
        ({"broker.url": "redis://:secret@other/0", "embedding.threads": 2, "metrics.port": 0, "scoring.threshold": 0.75}, True),
        ({"scoring.thresholds": {"code": 0.5}}, False),
        ({"redis.prefix": "other"}, False),
    ],
)
def test_settings_that_workers_need_alike_have_one_digest(flags: dict[str, Any], is_alike: bool) -> None:
    assert (load_settings(flags).alike() == load_settings({"redis.url": "redis://one/0"}).alike()) == is_alike


def test_the_reference_file_holds_every_setting_with_its_default() -> None:
    # Settings add the file's profiles to those of the package, so the file has none.
    defaults = Settings().model_dump(mode="json", exclude_none=True)
    own = defaults["scoring"] | {"profiles": {}}
    assert tomllib.loads(REFERENCE.read_text("utf-8")) == defaults | {"scoring": own}
    assert load_settings(config=REFERENCE).model_dump() == Settings().model_dump()
