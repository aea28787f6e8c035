"""The files that deploy workers: the Dockerfile, the Compose file, and the units for systemd."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml
from kp_scorer.errors import SettingsError
from kp_scorer.serve.tokens import admits, read_tokens
from kp_scorer.settings import Settings, load_settings

from tests.support.paths import REPOSITORY
from tests.support.rendering import DEPLOY, compose, compose_secrets, unknown_settings
from tests.support.required import required

TARGETS: Final = ("cpu", "gpu")


class Stage(NamedTuple):
    base: str
    """The stage or the image that the stage begins with."""
    instructions: list[tuple[str, str]]
    """The name and the arguments of each instruction."""


def stages() -> dict[str, Stage]:
    text = (REPOSITORY / "deploy" / "Dockerfile").read_text("utf-8")
    parts = re.findall(r"^FROM (\S+) AS (\S+)$(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(parts) == text.count("\nFROM "), "each stage has a name"
    return {name: Stage(base, re.findall(r"^([A-Z]+) (.*)$", part, re.MULTILINE)) for base, name, part in parts}


def arguments_of(name: str, *of: Stage) -> list[str]:
    """Return the arguments of each instruction of this name, in all stages unless some are given."""
    return [arguments for stage in of or stages().values() for each, arguments in stage.instructions if each == name]


def obeyed(target: str, name: str) -> list[str]:
    """Return the arguments of each instruction of this name that builds a target, beginning with those of its base stages."""
    stage = stages().get(target)
    return [*obeyed(stage.base, name), *arguments_of(name, stage)] if stage else []


def from_the_checkout() -> set[str]:
    """Return the paths that the Dockerfile copies from the checkout, not from another stage."""
    return {path for copy in arguments_of("COPY") if not copy.startswith("--from=") for path in copy.split()[:-1]}


def test_copied_files_exist_and_are_not_ignored() -> None:
    let_in = re.findall(r"^!(.+)$", (REPOSITORY / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert from_the_checkout() == set(let_in)
    assert [path for path in let_in if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize("target", TARGETS)
def test_the_worker_is_the_first_process_as_an_unprivileged_user_and_gets_signals(target: str) -> None:
    started: list[Any] = [word for name in ("ENTRYPOINT", "CMD") for word in json.loads(obeyed(target, name)[-1])]
    assert started == ["kp-scorer", "worker"]
    user, group = map(int, obeyed(target, "USER")[-1].split(":"))
    assert user > 0
    assert group > 0


@pytest.mark.parametrize("target", TARGETS)
def test_variables_of_the_image_are_settings(target: str) -> None:
    names = {pair.partition("=")[0] for pairs in obeyed(target, "ENV") for pair in pairs.split()}
    assert any(name.startswith("KP_") for name in names)
    assert list(unknown_settings(dict.fromkeys(names, ""))) == []


def test_extras_that_the_image_installs_exist() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    groups = re.findall(r"'\.\[([\w,-]+)]'", " ".join(arguments_of("RUN")))
    named = {extra for group in groups for extra in group.split(",")}
    assert named == {"embedded", "openvino", "otel-worker", "serve", "torch"}
    assert named <= set(extras)


@pytest.mark.parametrize("certificate", ["", "/etc/ssl/our index.pem"])
def test_the_certificate_of_a_private_index_is_there_where_pip_runs(certificate: str) -> None:
    builder = ["make", "--silent", "image", "BUILDER=printf '%s\\n'"]
    done = subprocess.run(
        builder, cwd=REPOSITORY, env=os.environ | {"PIP_CERT": certificate}, capture_output=True, text=True, check=True
    )
    arguments = done.stdout.splitlines()
    assert f"PIP_CERT={certificate}" in arguments
    assert (f"id=pip-cert,src={certificate}" in arguments) == ("--secret" in arguments) == bool(certificate)
    assert all("--mount=type=secret,id=pip-cert " in run for run in arguments_of("RUN") if "$INSTALL" in run)
    assert "PIP_CERT=${PIP_CERT:+/run/secrets/pip-cert}" in " ".join(arguments_of("ENV", stages()["pip"])).split()


def test_the_lock_has_hashes_of_all_but_torch_and_what_builds_the_package() -> None:
    entries = re.findall(r"^(([\w-]+)==\S+)(.*(?:\n .*)*)", (REPOSITORY / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert {name for _, name, hashes in entries if "--hash=sha256:" not in hashes} == {"torch"}
    read = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    project, locked = read["project"], {name for _, name, _ in entries}
    for group in (project["dependencies"], *project["optional-dependencies"].values()):
        named = {re.split(r"[^\w.-]", requirement)[0].lower().replace(".", "-") for requirement in group}
        assert named - {"kp-scorer"} <= locked
    assert set(read["build-system"]["requires"]) <= {pin for pin, _, _ in entries}


def test_all_packages_installed_for_users_are_verified() -> None:
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", "dev", "torch"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    installs = [line for line in printed.stdout.splitlines() if " -m pip " in line]
    assert len(installs) == 5
    assert all("--constraint constraints.txt" in line or line.startswith("sed -n '/^pip==/") for line in installs)
    environment = " ".join(arguments_of("ENV", stages()["pip"]))
    assert {"PIP_CONSTRAINT=/src/constraints.txt", "PIP_BUILD_CONSTRAINT=/src/constraints.txt"} <= set(environment.split())


def test_no_index_and_no_registry_is_named() -> None:
    for path in ("constraints.txt", "deploy/Dockerfile"):
        assert "://" not in (REPOSITORY / path).read_text("utf-8")
    assert [stage.base for stage in stages().values() if stage.base not in stages()] == ["${BASE}"]


PROFILES: Final = ("redis", "rabbitmq")


@pytest.fixture
def services() -> dict[str, dict[str, Any]]:
    by_name: dict[str, dict[str, Any]] = compose()["services"]
    return by_name


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compose_secrets(tmp_path_factory.mktemp("deploy"))


def conforms(content: dict[str, Any], file: Path) -> bool:
    """Return whether a Compose file conforms to the schema of the Compose specification."""
    file.write_text(json.dumps(content))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("profile", PROFILES)
def test_the_file_conforms_to_the_compose_specification(profile: str, tmp_path: Path) -> None:
    content = compose(COMPOSE_PROFILES=profile)
    assert conforms(content, tmp_path / "compose.json")
    content["services"]["serve"]["port"] = content["services"]["serve"].pop("image")
    assert not conforms(content, tmp_path / "compose.json")


def test_named_secrets_configs_and_volumes_are_defined(services: dict[str, dict[str, Any]]) -> None:
    composition = compose()
    for kind in ("secrets", "configs"):
        named = {
            each if isinstance(each, str) else each["source"] for service in services.values() for each in service.get(kind, ())
        }
        assert named == set(composition[kind])
    mounted = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())}
    assert {name for name in mounted if not name.startswith(".")} == set(composition["volumes"])
    assert {name for service in services.values() for name in service.get("depends_on", ())} <= set(services)


def test_secrets_and_configs_are_mounted_since_root_file_systems_are_read_only(services: dict[str, dict[str, Any]]) -> None:
    composition = compose()
    sources = [each for kind in ("secrets", "configs") for each in composition[kind].values()]
    # Compose mounts files. It copies secrets and configs from other sources into the container, which a read-only root forbids.
    assert [each for each in sources if set(each) != {"file"}] == []
    assert [config["file"] for config in composition["configs"].values() if not (DEPLOY / config["file"]).is_file()] == []
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


def test_deployed_workers_get_existing_settings_and_time_to_stop(services: dict[str, dict[str, Any]]) -> None:
    worker = services["worker"]
    assert list(unknown_settings(worker["environment"])) == []
    assert int(worker["stop_grace_period"].removesuffix("s")) >= Settings().worker.grace_s + 5


def test_the_deployed_server_gets_existing_settings_and_needs_its_token(
    services: dict[str, dict[str, Any]], secrets: Path
) -> None:
    server = services["serve"]
    assert list(unknown_settings(server["environment"])) == []
    tokens = Path(server["environment"]["KP_SERVE_TOKENS"]).name
    assert {tokens, "serve-broker-url", "serve-redis-url"} == set(server["secrets"])
    assert admits(read_tokens(str(secrets / tokens)), (secrets / tokens).read_text("utf-8").strip())
    serving = Settings().serve
    assert [port.rpartition(":")[2] for port in server["ports"]] == [str(serving.port), str(serving.grpc_port)]


def test_the_secrets_are_for_nobody_else_on_this_machine(secrets: Path) -> None:
    assert secrets.stat().st_mode & 0o777 == 0o700
    # Each container reads the files as a different user, so all may read them. The folder's mode keeps others on this machine
    # out.
    assert {file.stat().st_mode & 0o777 for file in secrets.iterdir()} == {0o644}


@pytest.mark.parametrize("profile", PROFILES)
def test_workers_connect_as_the_users_that_are_made(secrets: Path, profile: str) -> None:
    broker, store = ((secrets / f"worker-{name}-url").read_text("utf-8").strip() for name in (profile, "redis"))
    settings = load_settings({"broker.url": broker, "redis.url": store})
    assert f"user worker on >{settings.redis.server().password} " in (secrets / "users.acl").read_text("utf-8")
    assert settings.broker.is_redis == (profile == "redis")
    if profile == "rabbitmq":
        server = settings.broker.server()
        expected = f"default_user = {server.user}\ndefault_pass = {server.password}\n"
        assert (secrets / "rabbitmq.conf").read_text("utf-8") == expected


def test_each_user_of_redis_has_a_password_of_its_own(secrets: Path) -> None:
    text = (secrets / "users.acl").read_text("utf-8")
    passwords = re.findall(r"^user \w+ on >(\w{48}) ", text, re.MULTILINE)
    assert len(set(passwords)) == len(re.findall(r"^user \w+ on ", text, re.MULTILINE))
    # The script adds an administrator to the users of the shipped file.
    assert len(passwords) == len(re.findall("PASSWORD-OF-", (DEPLOY / "users.acl").read_text("utf-8"))) + 1


UNITS: Final = REPOSITORY / "deploy" / "systemd"
SERVICE: Final = "kp-scorer@.service"
INSTALLED: Final = "/opt/kp-scorer/bin/kp-scorer"


def lines_of(unit: str) -> list[tuple[str, str]]:
    text = (UNITS / unit).read_text("utf-8")
    return [(name, value) for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)]


def value_of(name: str) -> str:
    return dict(lines_of(SERVICE))[name]


def verified(directory: Path) -> "subprocess.CompletedProcess[str]":
    """Have systemd verify copies of the units in a directory, and return the result."""
    analyze = required("systemd-analyze", "systemd")
    # systemd also checks that the program exists, so the copies name one that does.
    for unit in UNITS.iterdir():
        (directory / unit.name).write_text(unit.read_text("utf-8").replace(INSTALLED, "/bin/true"), "utf-8")
    units = sorted(map(str, directory.iterdir()))
    return subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    done = verified(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_times_and_exit_codes_agree_with_the_worker() -> None:
    worker = Settings().worker
    assert worker.grace_s + 5 <= int(value_of("TimeoutStopSec")) <= worker.grace_s + 30
    assert int(value_of("TimeoutStartSec")) > 2 * worker.patience_s, "it waits for Redis, then for the broker"
    assert int(value_of("RestartPreventExitStatus")) == SettingsError.exit_code


def test_the_nightly_set_is_the_same_command_in_both() -> None:
    command = dict(lines_of("kp-scorer-keep.service"))["ExecStart"].replace("%%", "%").split()[1:]
    job = yaml.safe_load((DEPLOY / "kubernetes" / "keep" / "cronjob.yaml").read_text("utf-8"))
    (only,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert command[:-1] == only["args"][:-1]
