"""What the ledger in Redis is told of submissions, and tells of them."""

import hashlib
from typing import NamedTuple


class Submission(NamedTuple):
    """A submission about to be sent: its trace's id, its 16-byte digest, and itself as UTF-8 JSON."""

    trace_id: str
    digest: bytes
    payload: bytes


class Claim(NamedTuple):
    """A submission to be sent again."""

    trace_id: str
    payload: bytes
    resends: int
    """How often it has been sent again."""
    digest: bytes
    """Of what it says."""


class Waiting(NamedTuple):
    """What is known of a pending trace."""

    since_ms: int
    """Since when it is pending, in Unix time by Redis' clock."""
    resends: int
    """How often it has been sent again."""
    attempts: int
    """How many workers have ended while they decided it."""
    submission: bytes
    """As its client noted it; empty if it came without one."""


class Counts(NamedTuple):
    """How many submissions there have been, and what became of them: submitted = pending + decided + dead."""

    submitted: int
    pending: int
    decided: int
    dead: int


def letter_id_of(payload: bytes) -> str:
    """The id that a submission, of these bytes, has as a dead letter."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
