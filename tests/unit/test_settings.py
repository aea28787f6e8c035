"""Where settings come from, which wins, and what is refused."""

import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decoding import Limits
from kp_scorer.errors import SettingsError
from kp_scorer.scoring import PROFILES
from kp_scorer.settings import NoveltySettings, Settings, as_environment, load_scoring, load_settings
from pydantic import ValidationError

OWN_PROFILE: Final = "{complexity = 0.1, novelty = 0.2, tool_diversity = 0.3, outcome_confidence = 0.4}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "scorer.toml"
    path.write_text("[novelty]\nmax_elements = 20\nslack_elements = 2100\n[log]\nlevel = 'error'\n", "utf-8")
    return path


def written(directory: Path, text: str) -> Path:
    path = directory / "scorer.toml"
    path.write_text(text, "utf-8")
    return path


def test_defaults_are_those_of_the_specification() -> None:
    settings = load_settings()
    assert settings.scoring.threshold == 0.75
    assert settings.scoring.cap_step_term is False
    assert settings.novelty.max_elements == 1_000
    assert settings.limits == Limits()
    assert settings.scoring.policy().profiles == PROFILES


def test_file_wins_over_the_defaults(config: Path) -> None:
    settings = load_settings(config=config)
    assert (settings.novelty.max_elements, settings.log.level) == (20, "error")
    assert settings.novelty.ttl_s == Settings().novelty.ttl_s


def test_variable_wins_over_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_NOVELTY_MAX_ELEMENTS", "30")
    settings = load_settings(config=config)
    assert (settings.novelty.max_elements, settings.novelty.slack_elements, settings.log.level) == (30, 2100, "error")


def test_flag_wins_over_variable_and_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_NOVELTY_MAX_ELEMENTS", "30")
    monkeypatch.setenv("KP_NOVELTY_TTL_S", "31")
    settings = load_settings({"novelty.max_elements": "40"}, config)
    assert (settings.novelty.max_elements, settings.novelty.ttl_s, settings.novelty.slack_elements) == (40, 31.0, 2100)


def test_file_may_be_named_by_a_variable(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_CONFIG", str(config))
    assert load_settings().novelty.max_elements == 20


def test_named_file_wins_over_the_variables_file(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[novelty]\nmax_elements = 50\n", "utf-8")
    monkeypatch.setenv("KP_CONFIG", str(config))
    settings = load_settings(config=other)
    assert (settings.novelty.max_elements, settings.log.level) == (50, "info")


def test_variables_do_not_leak_from_one_load_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("KP_LOG_LEVEL", "debug")
        assert load_settings().log.level == "debug"
    assert load_settings().log.level == "info"


def test_domains_may_have_thresholds_and_profiles_of_their_own(tmp_path: Path) -> None:
    text = f"[scoring.thresholds]\ncode = 0.4\n[scoring.profiles]\n'data eng' = {OWN_PROFILE}\ncode = {OWN_PROFILE}\n"
    policy = load_settings(config=written(tmp_path, text)).scoring.policy()
    assert policy.bounds("code").threshold == 0.4
    assert policy.profile("data eng") == "data eng"
    assert policy.profiles["code"].outcome_confidence == 0.4
    assert policy.profiles["finance"] == PROFILES["finance"]


@pytest.mark.parametrize("section", ["scoring", "shadow"])
@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("review = 0.8", "review: expected at most the threshold of 0.75, got 0.8"),
        ("review = 0.6\nthresholds = {code = 0.5}", "reviews.code: expected at most the threshold of 0.5, got 0.6"),
        ("reviews = {code = 0.9}", "reviews.code: expected at most the threshold of 0.75, got 0.9"),
        ("aliases = {code = 'finance'}", "aliases.code: expected a name without a profile, a threshold or a review of its own"),
        (
            "thresholds = {qa = 0.5}\naliases = {qa = 'finance'}",
            "aliases.qa: expected a name without a profile, a threshold or a review of its own",
        ),
        (
            "aliases = {books = 'finanse'}",
            "aliases.books: expected a domain with a profile, a threshold or a review, got 'finanse'",
        ),
        (
            "aliases = {books = 'money', money = 'finance'}",
            "aliases.books: expected a domain with a profile, a threshold or a review, got 'money'",
        ),
    ],
)
def test_what_would_not_count_in_a_policy_is_refused(tmp_path: Path, section: str, text: str, where: str) -> None:
    with pytest.raises(SettingsError, match=f"^{section}: {re.escape(where)}$"):
        load_settings(config=written(tmp_path, f"[{section}]\n{text}"))


def test_weights_of_a_shadow_sum_to_one_too(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^shadow\.profiles: profile 'qa': weights must sum to 1"):
        load_settings(config=written(tmp_path, f"[shadow.profiles]\nqa = {OWN_PROFILE.replace('0.4', '0.5')}\n"))


def test_domains_may_be_taken_for_others(tmp_path: Path) -> None:
    text = "[scoring]\nreviews = {qa = 0.5}\naliases = {financial_analysis = 'finance', 'Q & A' = 'qa', misc = 'default'}"
    policy = load_settings(config=written(tmp_path, text)).scoring.policy()
    assert (policy.profile("financial_analysis"), policy.bounds("Q & A").review) == ("finance", 0.5)
    assert policy.knows("misc")
    assert not load_settings().scoring.policy().aliases


def test_a_shadow_is_a_whole_policy_of_its_own(tmp_path: Path) -> None:
    text = "[scoring]\nthreshold = 0.6\nthresholds = {code = 0.5}\n[shadow]\nenabled = true\nthresholds = {qa = 0.4}\n"
    settings = load_settings(config=written(tmp_path, text))
    policy = settings.shadow.policy()
    assert policy is not None
    assert [policy.bounds(domain).threshold for domain in ("qa", "code", "else")] == [0.4, 0.75, 0.75]
    assert policy.profiles == PROFILES
    assert not settings.shadow.is_published
    assert settings.scoring.policy().bounds("qa").threshold == 0.6


def test_there_is_no_shadow_unless_there_is_to_be_one() -> None:
    settings = load_settings({"shadow.threshold": 0.4, "shadow.via": "queue"})
    assert (settings.shadow.policy(), settings.shadow.is_published) == (None, False)


def test_a_shadows_queue_is_its_own_and_bounded() -> None:
    published = {"shadow.enabled": True, "shadow.via": "queue"}
    assert load_settings(published).shadow.is_published
    for taken in ("traces", "traces.intake", "traces.dead", "decisions.accepted", "decisions.review", "decisions.rejected"):
        with pytest.raises(SettingsError, match=r"^queues: shadow needs a name of its own$"):
            load_settings({"queues.shadow": taken})
    with pytest.raises(SettingsError, match=r"queues\.results_limit must be above 0 where shadow\.via is 'queue'"):
        load_settings({**published, "queues.results_limit": 0})
    assert load_settings({**published, "shadow.via": "none", "queues.results_limit": 0}).shadow.enabled


def test_domains_may_have_reviews_of_their_own_or_none(tmp_path: Path) -> None:
    text = "[scoring]\nthresholds = {code = 0.5}\nreview = 0.6\nreviews = {code = 0.5, finance = 0.7}"
    policy = load_settings(config=written(tmp_path, text)).scoring.policy()
    assert [policy.bounds(domain).review for domain in ("code", "finance", "else")] == [None, 0.7, 0.6]


def test_variable_may_hold_thresholds_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_SCORING_THRESHOLDS", '{"code": 0.4, "data_eng": 1}')
    assert load_settings().scoring.thresholds == {"code": 0.4, "data_eng": 1.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("novelty.max_elements", "many"),
        ("novelty.max_elements", "0"),
        ("novelty.ttl_s", "0"),
        ("novelty.ttl_s", "nan"),
        ("scoring.threshold", "1.01"),
        ("scoring.threshold", "-0.01"),
        ("scoring.threshold", "nan"),
        ("scoring.cap_step_term", "perhaps"),
        ("embedding.embedder", "none-at-all"),
        ("embedding.threads", "-1"),
        ("limits.depth", "7"),
        ("limits.depth", "201"),
        ("worker.batch_size", "0"),
        ("log.level", "INFO"),
        ("queues.traces", "two words"),
        ("queues.traces", ""),
        ("redis.prefix", "{kp}"),
        ("redis.prefix", "x" * 65),
        ("broker.visibility_timeout_s", "2"),
        ("broker.delivery_limit", "0"),
        ("queues.results_limit", "-1"),
        ("queues.accepted_when_full", "drop_newest"),
        ("results.accepted_via", "topic"),
        ("results.rejected_via", ""),
        ("results.plain", "sometimes"),
        ("shadow.enabled", "perhaps"),
        ("shadow.via", "stream"),
        ("results.task", "two words"),
        ("broker.url", "localhost:6379"),
        ("broker.url", "http://localhost"),
        ("redis.url", "amqp://localhost"),
    ],
)
def test_wrong_value_is_refused_by_name_wherever_it_is_given(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=rf"^{name}: "):
        load_settings({name: value})
    monkeypatch.setenv("KP_" + name.replace(".", "_").upper(), value)
    with pytest.raises(SettingsError, match=rf"^{name}: "):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dead", "traces"),
        ("accepted", "traces"),
        ("rejected", "traces.dead"),
        ("intake", "traces"),
        ("dead", "traces.intake"),
        ("accepted", "traces.intake"),
    ],
)
def test_a_queue_serves_one_purpose(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=r"^queues: .*names of their own"):
        load_settings({f"queues.{name}": value})


def test_the_intake_goes_by_the_name_of_the_queue_that_it_leads_to() -> None:
    assert load_settings().queues.intake_name == "traces.intake"
    assert load_settings({"queues.traces": "other"}).queues.intake_name == "other.intake"
    assert load_settings({"queues.intake": "celery"}).queues.intake_name == "celery"


def test_one_queue_for_both_outcomes_has_one_policy() -> None:
    one = {"queues.accepted": "decisions", "queues.rejected": "decisions"}
    with pytest.raises(SettingsError, match=r"^queues: accepted_when_full and rejected_when_full must be equal"):
        load_settings({**one, "queues.rejected_when_full": "drop_oldest"})
    assert load_settings({"queues.rejected_when_full": "drop_oldest"}).queues.when_full("accepted") == "wait"
    both = load_settings({**one, "queues.accepted_when_full": "none", "queues.rejected_when_full": "none"})
    assert both.queues.when_full("rejected") == "none"


def test_one_name_for_both_outcomes_is_one_thing() -> None:
    one = {"queues.accepted": "decisions", "queues.rejected": "decisions"}
    with pytest.raises(SettingsError, match=r"results\.accepted_via and results\.rejected_via must be equal where"):
        load_settings({**one, "results.accepted_via": "stream"})
    assert load_settings({**one, "results.accepted_via": "stream", "results.rejected_via": "none"}).via("accepted") == "stream"


@pytest.mark.parametrize("outcome", ["accepted", "rejected"])
def test_a_task_is_named_and_never_dropped(outcome: str) -> None:
    with pytest.raises(SettingsError, match=r"^results: task must be the name of the task to call"):
        load_settings({f"results.{outcome}_via": "task"})
    called = {f"results.{outcome}_via": "task", "results.task": "shop.decided"}
    with pytest.raises(
        SettingsError, match=rf"queues\.{outcome}_when_full must be 'wait' where results\.{outcome}_via is 'task'"
    ):
        load_settings({**called, f"queues.{outcome}_when_full": "drop_oldest"})
    assert load_settings({**called, f"queues.{outcome}_when_full": "none"}).via("accepted") in ("none", "queue")


def test_an_outcome_that_is_not_published_may_be_told_so_by_either_name() -> None:
    settings = load_settings(
        {"results.accepted_via": "none", "queues.rejected_when_full": "none", "results.rejected_via": "stream"}
    )
    assert (settings.via("accepted"), settings.via("rejected")) == ("none", "none")


def test_refusal_does_not_repeat_the_value() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"queues.traces": "secret word"})
    assert "secret" not in str(caught.value)


def test_every_wrong_value_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"novelty\.max_elements: .*log\.level: "):
        load_settings(config=written(tmp_path, "[novelty]\nmax_elements = 0\n[log]\nlevel = 'loud'\n"))


@pytest.mark.parametrize("name", ["novelty.max_elments", "noveltea.max_elements", "novelty.max_elements.x"])
def test_flag_that_is_no_setting_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{name.split('.')[0]}"):
        load_settings({name: "5"})


def test_flag_without_a_section_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^max_elements: expected SECTION\.NAME"):
        load_settings({"max_elements": "5"})


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("KP_NOVELTY_MAX_ELMENTS", r"^novelty\.max_elments: "),
        ("KP_NOVELTEA_MAX_ELEMENTS", "^KP_NOVELTEA_MAX_ELEMENTS: no setting"),
        ("KP_NOVELTY", "^KP_NOVELTY: no setting"),
        ("KP_", "^KP_: no setting"),
    ],
)
def test_variable_that_is_no_setting_is_refused(variable: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "5")
    with pytest.raises(SettingsError, match=told):
        load_settings()


def test_variables_of_others_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPX_NOVELTY_TTL_S", "5")
    monkeypatch.setenv("NOVELTY_MAX_ELEMENTS", "5")
    assert load_settings().novelty == NoveltySettings()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[novelty]\nmax_elments = 5\n", r"^novelty\.max_elments: "),
        ("[noveltea]\nmax_elements = 5\n", "^noveltea: "),
        ("max_elements = 5\n", "^max_elements: "),
        ("[scoring.profiles.code]\ncomplexity = 1.0\n", r"^scoring\.profiles\.code\.novelty: "),
        ("[scoring.thresholds]\ncode = 1.5\n", r"^scoring\.thresholds\.code: "),
    ],
)
def test_name_or_value_in_a_file_that_is_no_setting_is_refused(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=told):
        load_settings(config=written(tmp_path, text))


def test_profile_whose_weights_do_not_sum_to_one_is_refused_by_name(tmp_path: Path) -> None:
    text = f"[scoring.profiles]\ntravel = {OWN_PROFILE.replace('0.4', '0.5')}\n"
    with pytest.raises(SettingsError, match=r"scoring\.profiles: .*'travel': weights must sum to 1, these sum to 1\.1"):
        load_settings(config=written(tmp_path, text))


def test_records_that_would_expire_before_their_vectors_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"ledger\.ttl_s must be at least novelty\.ttl_s"):
        load_settings({"ledger.ttl_s": "59", "novelty.ttl_s": "60"})
    assert load_settings({"ledger.ttl_s": "60", "novelty.ttl_s": "60"}).ledger.ttl_s == 60


def test_required_embedder_cannot_be_none() -> None:
    with pytest.raises(SettingsError, match=r"^embedding: .*needs an embedder other than 'none'"):
        load_settings({"embedding.required": "true", "embedding.embedder": "none"})


def test_missing_file_is_refused_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"^config: there is no file .*absent\.toml"):
        load_settings(config=tmp_path / "absent.toml")
    monkeypatch.setenv("KP_CONFIG", str(tmp_path))
    with pytest.raises(SettingsError, match=r"^config: there is no file"):
        load_settings()


@pytest.mark.parametrize("raw", [b"[novelty\n", b"{}", b"\xff\xfe", b"[log]\nlevel = info\n"])
def test_file_that_is_no_toml_is_refused_by_its_path(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(raw)
    with pytest.raises(SettingsError, match=r"broken\.toml: "):
        load_settings(config=path)


def test_scoring_of_another_file_wins_over_settings_and_leaves_the_rest_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KP_SCORING_THRESHOLD", "0.6")
    monkeypatch.setenv("KP_SCORING_CAP_STEP_TERM", "true")
    other = written(tmp_path, "[scoring]\nthreshold = 0.5\n[scoring.thresholds]\ncode = 0.4\n[log]\nlevel = 'error'\n")
    scoring, named = load_scoring(other, load_settings())
    assert named == {"scoring.threshold", "scoring.thresholds"}
    assert (scoring.threshold, scoring.thresholds, scoring.cap_step_term) == (0.5, {"code": 0.4}, True)


def test_every_review_above_its_threshold_is_named(tmp_path: Path) -> None:
    text = "[scoring]\nreview = 0.8\n[scoring.thresholds]\ncode = 0.9\nlaw = 0.7\n[scoring.reviews]\ntax = 0.77\n"
    with pytest.raises(SettingsError) as raised:
        load_settings(config=written(tmp_path, text))
    assert str(raised.value) == (
        "scoring: review: expected at most the threshold of 0.75, got 0.8; "
        "reviews.law: expected at most the threshold of 0.7, got 0.8; "
        "reviews.tax: expected at most the threshold of 0.75, got 0.77"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[scoring]\nthreshold = 2\n", "scoring.threshold: "),
        ("[scoring]\n[log]\nlevel = 'loud'\n", "log.level: "),
        ("scoring = 5\n", "scorer.toml: scoring: expected a section of this name"),
        ("[scoring", "scorer.toml: "),
    ],
)
def test_scoring_of_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        load_scoring(written(tmp_path, text), Settings())


def test_scoring_of_no_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml: No such file"):
        load_scoring(tmp_path / "absent.toml", Settings())


def test_variable_that_should_be_json_and_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_SCORING_THRESHOLDS", "code=0.4")
    with pytest.raises(SettingsError, match=r"^environment: .*scoring"):
        load_settings()


def test_settings_cannot_be_changed() -> None:
    settings: Any = load_settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.novelty.max_elements = 5
    with pytest.raises(ValidationError, match="frozen"):
        settings.novelty = settings.novelty


NAMES: Final = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
CHOSEN: Final = st.fixed_dictionaries(
    {},
    optional={
        "broker.url": st.sampled_from(["", "redis://:pa%23ss@host:1/0", "amqps://user:pass@host//"])
        | NAMES.map(lambda name: f"amqp://u{quote(name, safe='')}:%3F@host/{quote(name, safe='')}"),
        "redis.url": st.sampled_from(["", "unix:///run/kp.sock?db=1", "rediss://host", "redis+sentinel://a,b?primary=c"]),
        "redis.timeout_s": st.floats(0.001, 1e9),
        "queues.accepted": st.from_regex(r"[A-Za-z0-9_.:-]{1,20}", fullmatch=True),
        "scoring.threshold": st.floats(0, 1),
        "scoring.thresholds": st.dictionaries(NAMES, st.floats(0, 1), max_size=3),
        "scoring.profiles": st.dictionaries(NAMES, st.just(PROFILES["medical"].model_dump()), max_size=2),
        "scoring.cap_step_term": st.booleans(),
        "novelty.max_elements": st.integers(1, 10**9),
        "embedding.model": NAMES | st.sampled_from(["5", "null", '"quoted"', "{}"]),
        "worker.concurrency": st.integers(1, 999),
        "log.format": st.sampled_from(["auto", "json", "console"]),
    },
)


@given(CHOSEN)
def test_settings_pass_through_the_environment_unchanged(flags: dict[str, Any]) -> None:
    settings = load_settings(flags)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in as_environment(settings).items():
            patch.setenv(name, value)
        assert load_settings().model_dump() == settings.model_dump()
