"""Looks into gates: the traces that they keep, and whether two of them know the same."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from kp_scorer.gate import Gate
from kp_scorer.gate.facts import StoredFact
from kp_scorer.novelty.log import Place


def kept_in(kept_facts: Iterable[StoredFact]) -> list[str]:
    """Return the sorted ids of the traces that are still kept after all these facts and notes."""
    trace_ids = dict[Place, str]()
    for stored in kept_facts:
        if stored.fact:
            trace_ids[stored.place] = stored.fact.trace_id
        if stored.dropped:
            del trace_ids[stored.dropped]
    return sorted(trace_ids.values())


def same_is_known(first: Gate, second: Gate) -> bool:
    """Return whether two gates have the same runs and kept traces of each domain, and the same covers up to rounding."""
    domains, also = map(_used_domains, (first, second))
    return domains.keys() == also.keys() and all(
        np.array_equal(domain.runs["at"], also[name].runs["at"])
        and np.array_equal(domain.kept_rows["at"], also[name].kept_rows["at"])
        and np.array_equal(domain.kept_rows["vector"], also[name].kept_rows["vector"])
        and np.allclose(domain.covers(0), also[name].covers(0), atol=1e-4)
        for name, domain in domains.items()
    )


def _used_domains(gate: Gate) -> dict[str, Any]:
    return {name: domain for name, domain in gate._domains.items() if domain.runs or domain.kept_rows}
