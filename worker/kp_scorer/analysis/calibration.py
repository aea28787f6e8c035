"""Thresholds by domain for a target, and how they do on traces that had no part in choosing them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal, NamedTuple

import numpy as np

from kp_scorer.analysis.suggestion import Share, Suggestion, counted_share, suggest
from kp_scorer.analysis.target import Target
from kp_scorer.analysis.threshold import BAD, GOOD, UNLABELLED, Sample, threshold_for
from kp_scorer.decision import Decision

HELD_BACK: Final = 0.3
"""The share of each domain's traces that is held back."""

_SEED: Final = 2

Lack = Literal["too_few", "out_of_reach"]
"""Why there is no suggestion: too few traces, or no threshold has the precision."""


class HeldBack(NamedTuple):
    """What a threshold chosen without them did to traces."""

    traces: int
    accepted: Share | None
    """None where none were held back."""
    precision: Share | None
    """None where no accepted trace has a label."""


class Cohort(NamedTuple):
    """Traces that get one threshold, all of a domain or several domains together."""

    traces: int
    labelled: int
    """How many of them have a label."""
    suggestion: Suggestion | None
    """Made of all of them."""
    lack: Lack | None
    """Why there is none; None if there is one."""
    held_back: HeldBack | None
    """None if there is no suggestion, or without those held back there would be none."""


class Calibration(NamedTuple):
    """What is suggested."""

    domains: Mapping[str, Cohort]
    """Every domain, in the order of their names."""
    rest: Cohort
    """Of the domains with too few traces that keep none, or of all if these are still too few: for these and all others."""
    rest_is_all: bool


class _Split(NamedTuple):
    sample: Sample
    fitting: Sample
    held_back: Sample


def samples_of(decisions: Iterable[Decision], labels: Mapping[str, bool], aliases: Mapping[str, str]) -> dict[str, Sample]:
    """The scores of decisions by the domain whose threshold they would be held against, with labels by trace id.

    What domains were taken for when they were decided counts only where ``aliases`` say nothing else.
    """
    found: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for decision in decisions:
        good = labels.get(decision.trace_id)
        then = decision.taken_for or decision.domain
        found[aliases.get(decision.domain) or aliases.get(then, then)].append(
            (decision.score, UNLABELLED if good is None else GOOD if good else BAD)
        )
    return {
        domain: Sample(np.array([score for score, _ in pairs]), np.array([label for _, label in pairs]))
        for domain, pairs in found.items()
    }


def calibrate(samples: Mapping[str, Sample], target: Target, kept: Collection[str] = ()) -> Calibration:
    """Suggest a threshold for each domain with enough traces, and one for the rest; there is at least one domain.

    Domains in ``kept`` keep a threshold of their own if they have too few traces, and so have no part in that of the rest.

    The split into what is held back and the rest depends on nothing but the number of a domain's traces.
    """
    splits = {domain: _split(sample) for domain, sample in sorted(samples.items())}
    few = [split for domain, split in splits.items() if domain not in kept and _is_too_few(split.sample, target)]
    rest = _joined(few)
    rest_is_all = rest is None or _is_too_few(rest.sample, target)
    if rest is None or rest_is_all:
        rest = _joined(splits.values())
        assert rest is not None
    return Calibration({domain: _cohort(split, target) for domain, split in splits.items()}, _cohort(rest, target), rest_is_all)


def _split(sample: Sample) -> _Split:
    order = np.random.default_rng(_SEED).permutation(len(sample.scores))
    held, kept = np.split(order, [round(HELD_BACK * len(order))])
    return _Split(sample, sample.part(kept), sample.part(held))


def _joined(splits: Iterable[_Split]) -> _Split | None:
    """Several domains as one; None if there are none."""
    columns = list(zip(*splits, strict=True))
    if not columns:
        return None
    return _Split(*(Sample(*(np.concatenate(part) for part in zip(*column, strict=True))) for column in columns))


def _is_too_few(sample: Sample, target: Target) -> bool:
    counting = sample if target.of == "accept" else sample.labelled
    return len(counting.scores) < target.least_traces


def _cohort(split: _Split, target: Target) -> Cohort:
    too_few = _is_too_few(split.sample, target)
    suggestion = None if too_few else suggest(split.sample, target)
    return Cohort(
        traces=len(split.sample.scores),
        labelled=len(split.sample.labelled.scores),
        suggestion=suggestion,
        lack=None if suggestion else "too_few" if too_few else "out_of_reach",
        held_back=_held_back(split, target) if suggestion else None,
    )


def _held_back(split: _Split, target: Target) -> HeldBack | None:
    threshold = threshold_for(split.fitting, target)
    if threshold is None:
        return None
    accepted = split.held_back.part(split.held_back.scores >= threshold)
    good, bad = (int((accepted.labels == label).sum()) for label in (GOOD, BAD))
    of = len(split.held_back.scores)
    return HeldBack(of, counted_share(len(accepted.scores), of), counted_share(good, good + bad))
