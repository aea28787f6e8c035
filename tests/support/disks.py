"""A disk that is nearly full."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nearly_full_disk() -> Iterator[None]:
    """Let no file grow beyond a thousand bytes during the block, as on a nearly full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
