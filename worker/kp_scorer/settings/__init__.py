"""Settings: read once at start from flags, ``KP_…`` variables, a TOML file and these defaults, the first of which wins."""

from kp_scorer.settings.loading import load_settings
from kp_scorer.settings.settings import Settings

__all__ = ["Settings", "load_settings"]
