"""The files of ``deploy``, rendered: Compose's with its variables replaced, and Kubernetes' as kubectl renders them."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.loading import as_environment

from tests.support.paths import REPOSITORY
from tests.support.processes import output_of
from tests.support.required import required

DEPLOY: Final = REPOSITORY / "deploy"

_VARIABLE: Final = re.compile(r"(?<!\$)\$\{(\w+):-([^}]*)\}")


def compose(**variables: str) -> dict[str, Any]:
    """Return the Compose file with its variables replaced, by their defaults unless given."""
    text = (DEPLOY / "compose.yaml").read_text("utf-8")
    rendered: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(lambda match: variables.get(match[1], match[2]), text))
    return rendered


def compose_secrets(folder: Path) -> Path:
    """Have the script make the secrets in ``folder``, with the users of Redis beside it; return the folder of secrets."""
    for name in ("secrets.sh", "users.acl"):
        shutil.copy(DEPLOY / name, folder)
    # The second run must keep the files of the first.
    for _ in range(2):
        output_of("sh", folder / "secrets.sh")
    return folder / "secrets"


@cache
def kubernetes(overlay: str) -> Sequence[dict[str, Any]]:
    """Return the objects of an overlay. They are rendered once, so no caller may change them."""
    kubectl = required("kubectl", hint="it takes one with kustomize 5; Debian's is too old")
    return list(yaml.safe_load_all(output_of(kubectl, "kustomize", DEPLOY / "kubernetes" / overlay)))


def container_variables(overlay: str) -> dict[str, str]:
    by_kind = {each["kind"]: each for each in kubernetes(overlay)}
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    variables: dict[str, str] = by_kind["ConfigMap"]["data"] | {each["name"]: each["value"] for each in container["env"]}
    return variables


def overlay_settings(overlay: str, url: str = "") -> Settings:
    """Return the settings of an overlay's worker, with ``url`` in place of the URLs in files that only its pod has."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in container_variables(overlay).items():
            if not name.endswith("_FILE"):
                patch.setenv(name, value)
        return load_settings({"broker.url": url, "redis.url": url})


def unknown_settings(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the variables named KP_… that stand neither for a setting nor for the file of one."""
    settings = set(as_environment(Settings()))
    yield from (name for name in variables if name.startswith("KP_") and name.removesuffix("_FILE") not in settings)
