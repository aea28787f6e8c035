"""The settings, which a process reads once as it starts: flags win over ``KP_…`` variables, a TOML file and the defaults."""

from kp_scorer.settings.loading import load_settings
from kp_scorer.settings.settings import Settings

__all__ = ["Settings", "load_settings"]
