"""Secrets in files: what a variable that ends in _FILE names, and what is refused without a word of what it holds."""

from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from kp_scorer.cli.main import commands
from kp_scorer.errors import SettingsError
from kp_scorer.settings import as_environment, load_settings

SECRET: Final = "Hunter2Hunter2"
URL: Final = f"redis://user:{SECRET}@host:6380/2"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "url"
    path.write_text(f"{URL}\n", "utf-8")
    return path


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
@pytest.mark.parametrize("section", ["broker", "redis"])
def test_a_file_is_read_without_the_end_of_its_line(
    section: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "url"
    path.write_text(URL + end, "utf-8", newline="")
    monkeypatch.setenv(f"KP_{section.upper()}_URL_FILE", str(path))
    assert load_settings() == load_settings({f"{section}.url": URL})


def test_a_secret_in_a_file_counts_as_its_variable_does(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "scorer.toml"
    config.write_text("broker.url = 'redis://elsewhere'", "utf-8")
    monkeypatch.setenv("KP_BROKER_URL_FILE", str(secret))
    assert load_settings(config=config).broker.url == URL
    assert load_settings({"broker.url": "redis://flag"}, config).broker.url == "redis://flag"


def test_an_empty_variable_gives_no_secret(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_BROKER_URL", "")
    monkeypatch.setenv("KP_BROKER_URL_FILE", str(secret))
    assert load_settings().broker.url == URL


def test_a_secret_in_a_file_reaches_another_process_as_a_variable(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_BROKER_URL_FILE", str(secret))
    settings = load_settings()
    monkeypatch.delenv("KP_BROKER_URL_FILE")
    for name, value in as_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


def test_a_secret_given_twice_is_refused_by_both_names(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_REDIS_URL", URL)
    monkeypatch.setenv("KP_REDIS_URL_FILE", str(secret))
    assert told() == "KP_REDIS_URL, KP_REDIS_URL_FILE: expected one of them, not both"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (SECRET.encode() + b"\xff", "is no text"),
        (SECRET.encode() * 10_000, "is too large"),
    ],
)
def test_a_file_without_a_secret_is_refused_by_its_variable(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / SECRET
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("KP_BROKER_URL_FILE", str(path))
    assert told() == f"KP_BROKER_URL_FILE: the file that it names {reason}"


@pytest.mark.parametrize("named", ["", ".", "/dev/zero"])
def test_what_is_no_file_is_refused_by_its_variable(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_BROKER_URL_FILE", named)
    assert told().startswith("KP_BROKER_URL_FILE: the file that it names ")


@pytest.mark.parametrize("name", ["KP_BROKER_URLS_FILE", "KP_BROKER_FILE", "KP_BROKER_TIMEOUT_S_FILE", "KP_BROKER_URL_FILES"])
def test_a_variable_for_no_secret_is_refused(name: str, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(secret))
    assert told().startswith(f"{name.removeprefix('KP_').lower().replace('_', '.', 1)}: no setting has this name")


def test_a_secret_that_is_no_url_is_not_quoted(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret.write_text(f"redis://{SECRET}@host\nredis://{SECRET}@host\n", "utf-8")
    monkeypatch.setenv("KP_BROKER_URL_FILE", str(secret))
    assert SECRET not in told()


def test_a_command_says_what_is_wrong_with_a_file_and_up_refuses_a_secret(secret: Path) -> None:
    missing = CliRunner().invoke(commands, ["stats"], env={"KP_BROKER_URL_FILE": "/nowhere"})
    assert isinstance(missing.exception, SettingsError)
    given = CliRunner().invoke(commands, ["up"], env={"KP_BROKER_URL_FILE": str(secret)})
    assert isinstance(given.exception, SettingsError)
    assert "`up` brings its own Redis" in str(given.exception)


def told() -> str:
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert SECRET not in str(refused.value)
    return str(refused.value)
