"""The Compose file: it is one, nobody else's machine reaches what it starts, and it holds no secret."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from kp_scorer.settings import Settings, load_settings

from tests.support.paths import REPOSITORY
from tests.support.rendering import DEPLOY, compose, compose_secrets, unknown_settings

PROFILES: Final = ("redis", "rabbitmq")


@pytest.fixture
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script makes."""
    return compose_secrets(tmp_path_factory.mktemp("deploy"))


@pytest.mark.parametrize("profile", PROFILES)
def test_it_is_what_the_specification_allows(profile: str) -> None:
    specification = pytest.importorskip("compose_spec")
    assert specification.PyCompose.from_json(json.dumps(compose(COMPOSE_PROFILES=profile))).service_names()


def test_what_it_names_is_defined(services: dict[str, dict[str, Any]]) -> None:
    whole = compose()
    for kind in ("secrets", "configs"):
        named = {
            each if isinstance(each, str) else each["source"] for service in services.values() for each in service.get(kind, ())
        }
        assert named == set(whole[kind])
    mounted = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())}
    assert {name for name in mounted if not name.startswith(".")} == set(whole["volumes"])
    assert {name for service in services.values() for name in service.get("depends_on", ())} <= set(services)


def test_nothing_is_copied_into_a_root_file_system_that_takes_nothing(services: dict[str, dict[str, Any]]) -> None:
    whole = compose()
    given = [each for kind in ("secrets", "configs") for each in whole[kind].values()]
    # Compose mounts files, and copies what comes from elsewhere.
    assert [each for each in given if set(each) != {"file"}] == []
    assert [config["file"] for config in whole["configs"].values() if not (DEPLOY / config["file"]).is_file()] == []
    assert any(service.get("read_only") for service in services.values())


def test_nothing_is_published_beyond_this_machine(services: dict[str, dict[str, Any]]) -> None:
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert published
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []
    assert [name for name, service in services.items() if service.get("network_mode") or service.get("privileged")] == []


def test_every_image_has_a_version_and_ours_is_this_one(services: dict[str, dict[str, Any]]) -> None:
    versions = {name: service["image"].partition(":")[2] for name, service in services.items()}
    assert all(re.match(r"v?\d", version) for version in versions.values()), versions
    assert versions["worker"] == tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def test_workers_are_given_settings_that_exist_and_their_time_to_stop(services: dict[str, dict[str, Any]]) -> None:
    worker = services["worker"]
    assert list(unknown_settings(worker["environment"])) == []
    assert int(worker["stop_grace_period"].removesuffix("s")) >= Settings().worker.grace_s + 5


def test_the_secrets_are_for_nobody_else_on_this_machine(secrets: Path) -> None:
    assert secrets.stat().st_mode & 0o777 == 0o700
    # By a user of its own in each container.
    assert {file.stat().st_mode & 0o777 for file in secrets.iterdir()} == {0o644}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_secret_is_made(secrets: Path, profile: str) -> None:
    files = [secret["file"] for secret in compose(COMPOSE_PROFILES=profile)["secrets"].values()]
    assert [file for file in files if not (secrets.parent / file).read_text("utf-8").strip()] == []


@pytest.mark.parametrize("profile", PROFILES)
def test_workers_connect_as_the_users_that_are_made(secrets: Path, profile: str) -> None:
    broker, store = ((secrets / f"worker-{name}-url").read_text("utf-8").strip() for name in (profile, "redis"))
    settings = load_settings({"broker.url": broker, "redis.url": store})
    assert f"user worker on >{settings.redis.server().password} " in (secrets / "users.acl").read_text("utf-8")
    assert settings.broker.is_redis == (profile == "redis")
    if profile == "rabbitmq":
        server = settings.broker.server()
        assert (secrets / "rabbitmq.conf").read_text(
            "utf-8"
        ) == f"default_user = {server.user}\ndefault_pass = {server.password}\n"


def test_each_user_of_redis_has_a_password_of_its_own(secrets: Path) -> None:
    text = (secrets / "users.acl").read_text("utf-8")
    passwords = re.findall(r"^user \w+ on >(\w{48}) ", text, re.MULTILINE)
    assert len(set(passwords)) == len(re.findall(r"^user \w+ on ", text, re.MULTILINE))
    # Two more than elsewhere: whoever monitors, and an administrator.
    assert len(passwords) == len(re.findall("PASSWORD-OF-", (DEPLOY / "users.acl").read_text("utf-8"))) + 2
