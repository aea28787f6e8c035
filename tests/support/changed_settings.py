"""Settings that differ from those of another test in a few values."""

from collections.abc import Callable

from kp_scorer.settings import Settings, load_settings

SettingsWith = Callable[..., Settings]
"""A function that makes settings with some values changed: ``worker__concurrency=4`` changes ``worker.concurrency``."""


def with_changed(settings: Settings, **changed: object) -> Settings:
    sections = settings.model_dump()
    for name, value in changed.items():
        section, _, key = name.partition("__")
        sections[section][key] = value
    return Settings.model_validate(sections)


def settings_at(url: str, **changed: object) -> Settings:
    """Return settings with one Redis as both the broker and the store."""
    return with_changed(load_settings({"broker.url": url, "redis.url": url}), **changed)
