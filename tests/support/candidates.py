"""Candidates for tests of the novelty log."""

import hashlib

import numpy as np
from kp_scorer.novelty import Candidate

MINUTE_MS = 60_000


def candidate(trace_id: str, seed: int, dimensions: int = 8) -> Candidate:
    """A candidate whose digest and unit vector follow from the seed."""
    vector = np.random.default_rng(seed).normal(size=dimensions).astype(np.float32)
    vector /= np.linalg.norm(vector)
    return Candidate(trace_id, hashlib.blake2b(str(seed).encode(), digest_size=16).digest(), vector)
