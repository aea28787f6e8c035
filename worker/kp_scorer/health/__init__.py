"""How a worker is: what it notes in a file once a second, and what a probe makes of that. Cheap to import."""

from kp_scorer.health.files import chosen_directory, directory_of, find, make_private, read, remove, sweep, write
from kp_scorer.health.state import Stall, State, why_not_live, why_not_ready

__all__ = [
    "Stall",
    "State",
    "chosen_directory",
    "directory_of",
    "find",
    "make_private",
    "read",
    "remove",
    "sweep",
    "why_not_live",
    "why_not_ready",
    "write",
]
