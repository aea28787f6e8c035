"""Where settings come from, and how another process gets the same."""

import json
import os
import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import SettingsError as SourceError

from kp_scorer.environment import Variables, refuse_unknown_variables
from kp_scorer.errors import SettingsError
from kp_scorer.settings.policies import ScoringSettings
from kp_scorer.settings.whole import Settings

_REFERENCE: Final = "kp-scorer reference kp-scorer.toml"


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Read the settings.

    Args:
        flags: values given on the command line, by dotted name: ``{"broker.url": ...}``. They win over everything.
        config: the TOML file; without it the one that ``KP_CONFIG`` names, if any.

    Raises:
        SettingsError: a value that cannot be used, a name that is not a setting, or a file that cannot be read.
    """
    config = config_file(config)
    if config is not None and not config.is_file():
        raise SettingsError(f"config: there is no file {config}; `{_REFERENCE}` prints one to start from")

    class _Sources(Settings, BaseSettings):
        model_config = SettingsConfigDict(env_prefix="KP_", env_nested_delimiter="_", env_nested_max_split=1)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, Variables(settings_cls, _secrets()), TomlConfigSettingsSource(settings_cls, config)

    refuse_unknown_variables(Settings.model_fields)
    try:
        return Settings(**dict(_Sources(**_nested(flags or {}))))
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item) for item in error.errors())) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{config}: {error}") from None
    except SourceError as error:
        raise SettingsError(f"environment: {error}; tables are written as JSON there") from None


def config_file(given: Path | None) -> Path | None:
    """The file that settings are read from: the one given, or else the one that ``KP_CONFIG`` names, if any."""
    named = os.environ.get("KP_CONFIG")
    return Path(named) if given is None and named else given


def variables_given(names: Collection[str]) -> list[str]:
    """The variables that are there for settings of these dotted names."""
    wanted = {f"KP_{name}".replace(".", "_").upper() for name in names}
    return sorted(variable for variable in os.environ if variable.upper() in wanted)


class ScoringTried(NamedTuple):
    """The section ``scoring`` of a file, laid over settings."""

    scoring: ScoringSettings
    named: frozenset[str]
    """What the file itself says, by dotted names."""


def load_scoring(file: Path, settings: Settings) -> ScoringTried:
    """Read the section ``scoring`` of a TOML file of settings; what it does not name is as in ``settings``.

    Unlike in :func:`load_settings`, the file wins over variables and flags: it is what is tried.

    Raises:
        SettingsError: as :func:`load_settings`, or the file has no such section.
    """
    try:
        found = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: {error}") from None
    named = found.get("scoring")
    if not isinstance(named, dict):
        raise SettingsError(f"{file}: scoring: expected a section of this name")
    try:
        scoring = Settings.model_validate(found | {"scoring": settings.scoring.model_dump() | named}).scoring
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item) for item in error.errors())) from None
    return ScoringTried(scoring, frozenset(f"scoring.{name}" for name in named))


def _secrets() -> list[str]:
    """The variables of those settings that are never shown."""
    fields = ((section, name, field) for section, values in Settings() for name, field in type(values).model_fields.items())
    return [f"KP_{section}_{name}".upper() for section, name, field in fields if not field.repr]


def _explain(error: ErrorDetails) -> str:
    name = ".".join(map(str, error["loc"])) or "settings"
    if error["type"] == "extra_forbidden":
        close = get_close_matches(name, _names(), 1)
        return f"{name}: no setting has this name; " + (f"is it {close[0]}?" if close else f"`{_REFERENCE}` lists them all")
    return f"{name}: {error['msg'].removeprefix('Value error, ')}"


def _names() -> list[str]:
    return [f"{section}.{name}" for section, values in Settings() for name in type(values).model_fields]


def as_environment(settings: Settings) -> dict[str, str]:
    """The variables that make another process load exactly these settings."""
    variables: dict[str, str] = {}
    for section, values in settings.model_dump(mode="json").items():
        for name, value in values.items():
            # What is not set cannot be written in a variable.
            if value is None:
                continue
            variables[f"KP_{section}_{name}".upper()] = value if isinstance(value, str) else json.dumps(value)
    return variables


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, value in flags.items():
        section, _, name = dotted.partition(".")
        if not name:
            raise SettingsError(f"{dotted}: expected SECTION.NAME, such as novelty.max_elements")
        nested.setdefault(section, {})[name] = value
    return nested
