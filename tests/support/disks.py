"""A disk that is nearly full."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nearly_full_disk() -> Iterator[None]:
    """A disk that takes a thousand bytes of each file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
