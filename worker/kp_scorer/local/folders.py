"""The folders of a user's files."""

import os
from pathlib import Path


def state_dir() -> Path:
    """Return the folder of the running instance's note and, by default, of its data; raise RuntimeError without a home."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kp-scorer"


def cache_dir() -> Path:
    """Return the folder of compiled rules; raise RuntimeError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kp-scorer"
