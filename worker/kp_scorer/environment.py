"""What the variables called ``KP_…`` are: ours, misspelt, or Kubernetes' own."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from pydantic_settings import EnvSettingsSource

from kp_scorer.errors import SettingsError

_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")


class Variables(EnvSettingsSource):
    """The environment without what Kubernetes puts there."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        links = service_links(os.environ)
        return {name: value for name, value in super()._load_env_vars().items() if name.upper() not in links}


def refuse_unknown_variables(sections: Iterable[str]) -> None:
    """Raise SettingsError for a misspelt variable, which would otherwise silently do nothing."""
    prefixes = tuple(f"KP_{section.upper()}_" for section in sections)
    for variable in os.environ.keys() - service_links(os.environ):
        name = variable.upper()
        if name.startswith("KP_") and name != "KP_CONFIG" and not name.startswith(prefixes):
            raise SettingsError(f"{variable}: no setting has this name")


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
