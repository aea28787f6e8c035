"""Loads settings from flags, variables, files of secrets and a TOML file, and passes them to another process."""

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kp_scorer.errors import SettingsError
from kp_scorer.files import read_toml
from kp_scorer.settings.sections import ScoringSettings
from kp_scorer.settings.server_sections import read_secret
from kp_scorer.settings.settings import Settings

Sections = dict[str, dict[str, Any]]

_REFERENCE: Final = "kp-scorer reference kp-scorer.toml"


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Read the settings from flags, the environment and a TOML file.

    Args:
        flags: values by dotted name, such as ``{"broker.url": ...}``. They win over variables, and these over the file.
        config: the TOML file; by default the one that ``KP_CONFIG`` names, if any.

    Raises:
        SettingsError: a value that cannot be used, a name that is not a setting, or a file that cannot be read.
    """
    if config is None and (named := os.environ.get("KP_CONFIG")):
        config = Path(named)
    try:
        merged = read_toml(config) if config else {}
    except OSError as error:
        raise SettingsError(f"config: {config}: {error.strerror}; `{_REFERENCE}` prints one to start from") from None
    flags = flags or {}
    variables, files = _read_variables()
    for sections in (variables, _nested(flags)):
        # Keep a value of the file that stands where a section belongs, so that validation refuses it.
        merged = _merged(merged, {name: values for name, values in sections.items() if isinstance(merged.get(name, {}), dict)})
    settings = _checked(merged)
    # The sections know the files of their URLs, to read them again when a password changes. Flags win over files.
    urls = {name: getattr(settings, name).from_file(file) for name, file in files.items() if f"{name}.url" not in flags}
    return settings.model_copy(update=urls)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; for any other value, ``above`` wins."""
    return {**below} | {
        name: _merged(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }


def load_scoring(file: Path, settings: Settings) -> ScoringSettings:
    """Read the section ``scoring`` of a TOML file of settings; values that it does not name stay as in ``settings``.

    Unlike in :func:`load_settings`, the file wins over variables and flags, because the caller tries it out.

    Raises:
        SettingsError: as :func:`load_settings`, or the file has no such section.
    """
    try:
        content = read_toml(file)
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    named = content.get("scoring")
    if not isinstance(named, dict):
        raise SettingsError(f"{file}: scoring: expected a section of this name")
    return _checked(content | {"scoring": settings.scoring.model_dump() | named}).scoring


def filled_in(settings: Settings, sections: Mapping[str, Any]) -> Settings:
    """Return settings with values from ``sections`` where no source sets one; raise SettingsError if a value is wrong."""
    return _checked(_merged(sections, settings.model_dump(exclude_unset=True)))


def as_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that make another process load exactly these settings."""
    return {
        f"KP_{section}_{name}".upper(): value if isinstance(value, str) else json.dumps(value)
        for section, values in settings.model_dump(mode="json").items()
        for name, value in values.items()
        # A variable cannot express None, which is the default of all settings that may be None.
        if value is not None
    }


def _checked(sections: Mapping[str, Any]) -> Settings:
    try:
        return Settings.model_validate(sections)
    except ValidationError as error:
        raise SettingsError("; ".join(map(_explain, error.errors()))) from None


def _explain(error: ErrorDetails) -> str:
    name = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        names = [f"{section}.{name}" for section, values in Settings() for name in type(values).model_fields]
        close = get_close_matches(name, names, 1)
        return f"{name}: no setting has this name; " + (f"is it {close[0]}?" if close else f"`{_REFERENCE}` lists them all")
    # An error between settings has no single name: its message names them.
    return f"{name}: {error['msg']}".removeprefix(": ").replace("Value error, ", "", 1)


def _nested(flags: Mapping[str, Any]) -> Sections:
    nested: Sections = {}
    for dotted, value in flags.items():
        section, _, name = dotted.partition(".")
        if not name:
            raise SettingsError(f"{dotted}: expected SECTION.NAME, such as novelty.max_elements")
        nested.setdefault(section, {})[name] = value
    return nested


def _read_variables() -> tuple[Sections, dict[str, str]]:
    """Read the settings in the environment, with URLs from the files that it names; return these files, too, by section."""
    variables = {name.upper(): value for name, value in os.environ.items()}
    files: dict[str, str] = {}
    for section in ("broker", "redis"):
        secret = f"KP_{section}_URL".upper()
        if (file := variables.pop(f"{secret}_FILE", None)) is not None:
            if variables.get(secret):
                raise SettingsError(f"{secret}, {secret}_FILE: expected one of them, not both")
            variables[secret] = _secret_in(file, f"{secret}_FILE")
            files[section] = file
    sections: Sections = {}
    defaults = Settings()
    for variable in sorted(variables.keys() - {"KP_CONFIG"}):
        if not variable.startswith("KP_"):
            continue
        section, _, name = variable.removeprefix("KP_").lower().partition("_")
        if not name or section not in Settings.model_fields:
            # A misspelt variable would silently have no effect.
            raise SettingsError(f"{variable}: no setting has this name; they are called KP_SECTION_NAME")
        text, default = variables[variable], getattr(getattr(defaults, section), name, None)
        # ``queues.traces`` may also be the name of a single queue, which is not JSON.
        is_json = isinstance(default, tuple) or (isinstance(default, dict) and text.lstrip().startswith("{"))
        sections.setdefault(section, {})[name] = _parsed(variable, text) if is_json else text
    return sections, files


def _parsed(variable: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise SettingsError(f"{variable}: expected JSON, in which variables hold tables and lists") from None


def _secret_in(file: str, variable: str) -> str:
    """Return the content of a file without its line ending. No error quotes any of it."""
    try:
        secret = read_secret(file)
    except OSError as error:
        raise SettingsError(f"{variable}: the file that it names cannot be read: {error.strerror}") from None
    if not secret:
        raise SettingsError(f"{variable}: the file that it names is empty")
    return secret
