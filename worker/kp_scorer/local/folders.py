"""Where the package keeps files of its user, by the XDG base directories."""

import os
from pathlib import Path


def state_dir() -> Path:
    """Where the running instance is noted, and where its data lies by default."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kp-scorer"


def cache_dir() -> Path:
    """Where converted models lie; raises RuntimeError if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kp-scorer"
