"""Suggested thresholds as a file of settings."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kp_scorer.analysis.calibration import Calibration, Cohort
from kp_scorer.analysis.suggestion import Suggestion
from kp_scorer.analysis.target import Target
from kp_scorer.characters import escaped
from kp_scorer.cli.figures import interval, percent
from kp_scorer.settings import ScoringSettings


class Thresholds(NamedTuple):
    """What ``scoring.threshold`` and ``scoring.thresholds`` are to be."""

    default: float
    domains: Mapping[str, float]

    def of(self, domain: str) -> float:
        """The threshold that a domain gets."""
        return self.domains.get(domain, self.default)


def thresholds_of(found: Calibration, scoring: ScoringSettings) -> Thresholds:
    """What is suggested; what nothing is suggested for stays as it is set."""
    domains = dict(scoring.thresholds)
    for domain, cohort in found.domains.items():
        if cohort.suggestion:
            domains[domain] = cohort.suggestion.threshold
        elif cohort.lack == "out_of_reach":
            # That of the rest would miss what was asked for, too.
            domains.setdefault(domain, scoring.threshold)
    rest = found.rest.suggestion
    return Thresholds(rest.threshold if rest else scoring.threshold, dict(sorted(domains.items())))


def as_toml(thresholds: Thresholds, found: Calibration, head: Sequence[str]) -> str:
    """The file, with comments: at its head these, and what each threshold rests on."""
    return "".join(f"{line}\n" for line in [*(f"# {line}" for line in head), *_lines(thresholds, found)])


def head_of(target: Target, *, is_whole: bool) -> Iterator[str]:
    """What the file is and how it is used; ``is_whole``: whether the operator has nothing else in a file of settings."""
    what = "the traces of each domain to be accepted" if target.of == "accept" else "the accepted traces to be good"
    yield f"What kp-scorer calibrate suggests for {target.percents} of {what}."
    if is_whole:
        yield "Name this file with --config or KP_CONFIG, or take the section over into your own."
    else:
        yield "Take the section over into your own file of settings: in its place this one would drop the rest."
    yield "In brackets: what to expect of other traces of the same kind, in 19 of 20 cases."


def _lines(thresholds: Thresholds, found: Calibration) -> Iterator[str]:
    yield ""
    yield "[scoring]"
    yield f"# All domains {'' if found.rest_is_all else 'without one of their own '}together, {_basis(found.rest)}."
    yield f"threshold = {thresholds.default}"
    if thresholds.domains:
        yield ""
        yield "[scoring.thresholds]"
    for domain, threshold in thresholds.domains.items():
        cohort = found.domains.get(domain)
        yield f"# {_basis(cohort) if cohort else 'no traces: as it was'}."
        yield f"{_key(domain)} = {threshold}"


def _basis(cohort: Cohort) -> str:
    return f"{cohort.traces} traces: " + (_outlook(cohort.suggestion) if cohort.suggestion else "as it was")


def _outlook(suggestion: Suggestion) -> str:
    shares = [(suggestion.accepted, "accepted"), (suggestion.precision, "of these good")]
    return ", ".join(f"{percent(share.value)} ({interval(share)}) {what}" for share, what in shares if share)


def _key(name: str) -> str:
    """A name as a key of TOML, which writes texts as JSON does, but for characters that terminals act on."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else escaped(json.dumps(name, ensure_ascii=False))
