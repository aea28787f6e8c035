"""The URLs of servers, and files that hold them: how they are read, what is refused, and that no output holds a password."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.cli.main import commands
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import ScorerError, SettingsError
from kp_scorer.settings import load_settings
from kp_scorer.settings.urls import BROKER_SCHEMES, REDIS_SCHEMES, parse_url
from kp_scorer.store.connection import connect

SCHEMES = (*BROKER_SCHEMES, *REDIS_SCHEMES)
SECRET = "Hunter2Hunter2"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", "redis://localhost/"),
        ("redis://host", "redis://host/"),
        ("redis://host:6380/2", "redis://host:6380/2"),
        ("redis://:pa:ss@host/0", "redis://:pa%3Ass@host/0"),
        ("redis://user:p%23a%2Fs%40s;@[::1]:6379/0", "redis://user:p%23a%2Fs%40s%3B@[::1]:6379/0"),
        ("rediss://host:1", "rediss://host:1/"),
        ("amqp://guest:guest@rabbit:5672//", "amqp://guest:guest@rabbit:5672/%2F"),
        ("amqps://rabbit/%2Fa%2Fb", "amqps://rabbit/%2Fa%2Fb"),
        ("pyamqp://rabbit/vhost", "pyamqp://rabbit/vhost"),
        ("redis+sentinel://:pa%23ss@one,[::1]:2/3?primary=name", "redis://:pa%23ss@one:26379/3"),
    ],
)
def test_a_url_is_read_in_one_way(url: str, expected: str) -> None:
    assert parse_url(url, SCHEMES).without_parameters() == expected


@pytest.mark.parametrize(
    "url",
    [
        # The host is ``user``, the port is 12, and redis-py would silently ignore such a database.
        "redis://user:12/pass@host/0",
        *("redis://:pass#word@host/0", "redis://:pass/word@host/0", "redis://:pass?word@host/0", "redis://:pass@word@host/0"),
        *("redis://:pass?ssl_cert_reqs=none@host/0", "redis://:p%ffq@host", "redis://:p%zz@host", "redis://:\udcff@host"),
        *("redis://password@host", "redis://one;redis://two", "redis://one,two", "redis://[::1", "redis://ho st"),
        *("redis://host:0", "redis://host:65536", "redis://host:port", "redis://host/name", "redis://host/1/2"),
        *("redis://host?db=1", "redis://one?primary=name", "rediss://host?ssl_keyfile=/etc/passwd"),
        # A URL cannot weaken TLS.
        *("rediss://host?ssl_cert_reqs=none", "rediss://host?ssl_check_hostname=false"),
        *("amqp://host/one/two", "amqp://host/?heartbeat=10"),
        *("unix://host:12/run/redis.sock", "redis+socket:///run/redis.sock", "sentinel://host"),
        *("redis+sentinel://one,two/0", "redis+sentinel://one,two:0?primary=name", "redis+sentinel://one;two?primary=name"),
        *("redis+sentinel://one?primary=", "redis+sentinel://one?master=name"),
        "redis+sentinel://one?primary=name&sentinel_user=user",
        "redis+sentinel://one?primary=name&ssl_keyfile=/etc/passwd",
    ],
)
def test_ambiguous_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_url(url, SCHEMES)


def test_sentinels_have_options_apart_from_those_of_their_server() -> None:
    url = "rediss+sentinel://me:pa%23ss@one,[::1]:2,localhost/3?primary=name&sentinel_user=you&sentinel_password=a%26b%40"
    server = parse_url(url, SCHEMES)
    assert server.sentinels == ([("one", 26_379), ("[::1]", 2), ("localhost", 26_379)], "name", "you", "a&b@")
    settings = load_settings({"broker.url": url, "redis.url": url})
    listening = [("one", 26_379), ("::1", 2), ("localhost", 26_379)]
    with make_celery(settings) as app, connect(settings.redis, settings.broker.timeout_s) as client:
        of_results = app.backend.connparams
        assert [(host["host"], host["port"]) for host in of_results["hosts"]] == listening
        for options in (of_results, client.connection_pool.connection_kwargs):
            assert {"db": 3, "username": "me", "password": "pa#ss", "ssl_check_hostname": True}.items() <= options.items()
        for transport_options in (app.conf.broker_transport_options, app.conf.result_backend_transport_options):
            assert (transport_options["sentinels"], transport_options["master_name"]) == (listening, "name")
            expected = {"username": "you", "password": "a&b@", "ssl": True, "ssl_check_hostname": True}
            assert expected.items() <= transport_options["sentinel_kwargs"].items()


PIECES = st.sampled_from(
    ["/", "#", "?", "@", ":", "%", "%2", "[", "]", ";", "=", "&", " ", "\n", "\x1b", "ü", "12", "user", "\udcff"]
)
MANGLED = st.lists(PIECES, max_size=3).map("".join)
URLS = st.builds(
    lambda scheme, *parts: scheme + "".join(parts),
    st.sampled_from([f"{scheme}://" for scheme in (*SCHEMES, "http", "redis+socket")] + ["", "redis:", "redis:/", "redis//"]),
    MANGLED,
    st.sampled_from(["", ":"]),
    MANGLED,
    st.just(SECRET),
    MANGLED,
    st.sampled_from(["@localhost:1", "@localhost", "@", "", "@[::1]", "@localhost:port"]),
    st.sampled_from(["", "/", "/0", "//", "/run/x.sock?db=1", "?ssl_cert_reqs=none", f"?{SECRET}=1", "/0#x"])
    | st.builds("?primary=name{}={}".format, st.sampled_from(["", "&sentinel_user", "&sentinel_password"]), st.just(SECRET)),
)


WAYS: Final[dict[str, Callable[[str, str], tuple[list[str], dict[str, str]]]]] = {
    "flag": lambda section, url: ([f"--{section}-url", url], {}),
    "variable": lambda section, url: ([], {f"KP_{section.upper()}_URL": url}),
    "no file": lambda section, url: ([], {f"KP_{section.upper()}_URL_FILE": url}),
    "--set": lambda section, url: (["--set", f"{section}.url={url}"], {}),
    "no flag": lambda section, url: (["--set", f"{section}.url:{url}"], {}),
    "mistaken": lambda _, url: (["--set", url], {}),
    "file": lambda section, url: (["--config", "/dev/null", "--set", f"{section}.urls={url}"], {}),
}


@given(URLS, st.sampled_from(["broker", "redis"]), st.sampled_from(["file of a secret", *WAYS]))
@hypothesis_settings(max_examples=4 * hypothesis_settings().max_examples)
def test_no_output_holds_a_password(tmp_path_factory: pytest.TempPathFactory, url: str, section: str, way: str) -> None:
    if way == "file of a secret":
        secret = tmp_path_factory.getbasetemp() / "secret"
        secret.write_bytes(url.encode("utf-8", "surrogateescape"))
        way, url = "no file", str(secret)
    arguments, variables = WAYS[way](section, url)
    result = CliRunner().invoke(
        commands, ["score", "-", "--set", "embedding.embedder=none", *arguments], env=variables, input=""
    )
    assert SECRET not in result.output + result.stderr
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, SettingsError)
        assert "\n" not in str(result.exception)
        assert not set(chain(result.exception)) - {SettingsError}
        assert SECRET not in str(result.exception)


@given(URLS, st.sampled_from(["broker.url", "redis.url"]))
@hypothesis_settings(max_examples=2 * hypothesis_settings().max_examples)
def test_connections_are_described_without_the_password(url: str, name: str) -> None:
    try:
        settings = with_endpoints(load_settings({"broker.url": "amqp://other", "redis.url": "redis://other", name: url}))
    except ScorerError:
        return
    # The text before the colon is the name of a user, which may be shown.
    assume(SECRET not in settings.broker.server().user + settings.redis.server().user)
    with make_celery(settings) as app:
        texts = [repr(settings), app.connection_for_read().as_uri(), repr(app.connection_for_write()), app.backend.as_uri()]
    assert [text for text in texts if SECRET in text] == []


def chain(error: BaseException | None) -> list[type[BaseException]]:
    """Return the types of the errors that a traceback would print."""
    kinds = []
    while error is not None:
        kinds.append(type(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return kinds


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
    assert load_settings().model_dump() == load_settings({f"{section}.url": URL}).model_dump()


def test_a_secret_in_a_file_counts_as_its_variable_does(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "scorer.toml"
    config.write_text("broker.url = 'redis://elsewhere'", "utf-8")
    # An empty variable counts as unset, so it does not conflict with the file.
    monkeypatch.setenv("KP_BROKER_URL", "")
    monkeypatch.setenv("KP_BROKER_URL_FILE", str(secret))
    assert load_settings(config=config).broker.url == URL
    assert load_settings({"broker.url": "redis://flag"}, config).broker.url == "redis://flag"


def test_a_secret_given_twice_is_refused_by_both_names(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_REDIS_URL", URL)
    monkeypatch.setenv("KP_REDIS_URL_FILE", str(secret))
    assert error_text() == "KP_REDIS_URL, KP_REDIS_URL_FILE: expected one of them, not both"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (SECRET.encode() + b"\xff", "cannot be read: expected UTF-8"),
        (SECRET.encode() * 10_000, "cannot be read: expected at most 65536 bytes"),
    ],
)
def test_a_file_without_a_secret_is_refused_by_its_variable(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / SECRET
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("KP_BROKER_URL_FILE", str(path))
    assert error_text() == f"KP_BROKER_URL_FILE: the file that it names {reason}"


def test_up_refuses_a_secret(secret: Path) -> None:
    result = CliRunner().invoke(commands, ["up"], env={"KP_BROKER_URL_FILE": str(secret)})
    assert isinstance(result.exception, SettingsError)
    assert "`up` brings its own Redis" in str(result.exception)


def error_text() -> str:
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert SECRET not in str(refused.value)
    return str(refused.value)
