"""What the variables called ``KP_…`` are: ours, the names of files with secrets, misspelt, or Kubernetes' own."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from pydantic_settings import BaseSettings, EnvSettingsSource

from kp_scorer.errors import SettingsError

_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")
_LARGEST_SECRET_BYTES: Final = 65_536


class Variables(EnvSettingsSource):
    """The environment without what Kubernetes puts there, and with what the files say that it names for secrets."""

    def __init__(self, settings: type[BaseSettings], secrets: Collection[str]) -> None:
        """Read the variables of these settings; each of ``secrets``, such as ``KP_BROKER_URL``, may have a file instead.

        Raises:
            SettingsError: a secret is given in both ways, or there is none in its file.
        """
        self._secrets = secrets
        super().__init__(settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        links = service_links(os.environ)
        found = {name: value for name, value in super()._load_env_vars().items() if name.upper() not in links}
        for secret in self._secrets:
            variable = f"{secret}_FILE"
            if (file := found.pop(variable.lower(), None)) is None:
                continue
            if found.get(secret.lower()):
                raise SettingsError(f"{secret}, {variable}: expected one of them, not both")
            found[secret.lower()] = _secret_in(file, variable)
        return found


def _secret_in(file: str, variable: str) -> str:
    """What a file says, but for the end of its line. No error quotes any of it."""
    try:
        with Path(file).open("rb") as opened:
            # It may be a device that never ends.
            content = opened.read(_LARGEST_SECRET_BYTES + 1)
        secret = content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise SettingsError(f"{variable}: the file that it names cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{variable}: the file that it names is no text") from None
    if not secret or len(content) > _LARGEST_SECRET_BYTES:
        raise SettingsError(f"{variable}: the file that it names is {'too large' if secret else 'empty'}")
    return secret


def refuse_unknown_variables(sections: Iterable[str]) -> None:
    """Raise SettingsError for a misspelt variable, which would otherwise silently do nothing."""
    prefixes = tuple(f"KP_{section.upper()}_" for section in sections)
    for variable in os.environ.keys() - service_links(os.environ):
        name = variable.upper()
        if name.startswith("KP_") and name != "KP_CONFIG" and not name.startswith(prefixes):
            raise SettingsError(f"{variable}: no setting has this name; they are called KP_SECTION_NAME")


def service_links(variables: Mapping[str, str]) -> set[str]:
    """Names of the variables by which Kubernetes tells every container of a service, such as one called kp-redis.

    It sets ``KP_REDIS_PORT=tcp://10.0.0.1:6379`` together with ``KP_REDIS_SERVICE_HOST``, ``KP_REDIS_PORT_6379_TCP_ADDR`` and
    others. Where either of the first two is missing, they are someone's misspelt settings.
    """
    services = [
        name.removesuffix("_PORT")
        for name, value in variables.items()
        if re.fullmatch(r"KP(_[A-Z0-9_]+)?_PORT", name) and _ADDRESS.match(value)
    ]
    patterns = [
        re.compile(rf"{service}_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?)")
        for service in services
        if f"{service}_SERVICE_HOST" in variables
    ]
    return {name for name in variables if any(pattern.fullmatch(name) for pattern in patterns)}
