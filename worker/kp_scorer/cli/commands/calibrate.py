"""``kp-scorer calibrate``: suggest thresholds by domain."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import click

from kp_scorer.characters import escaped
from kp_scorer.cli.candidates import Candidates, Run
from kp_scorer.cli.gathering import Gathered, gathering_options, has_stored_labels
from kp_scorer.cli.keeping import compared
from kp_scorer.cli.options import labels_option
from kp_scorer.cli.output import open_output, print_note
from kp_scorer.decision import Decision
from kp_scorer.report.calibration import Calibration, Cohort, calibrate_samples, samples_of, with_thresholds
from kp_scorer.report.suggestion import Sample, Target
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import ScoringSettings
from kp_scorer.trace import namespace_of

_NO_LABEL: Final = "no trace has a label: expected traces in FILE, --labels, or --stored after `kp-scorer label`"
_OTHER_DOMAINS: Final = "(all others)"  # The row of all domains without a threshold of their own; no domain has such brackets.
_NEAR: Final = 0.02
_NAMED: Final = 5  # At most this many producers are named, those with the most traces first.
_LEAST_SHARE: Final = 0.001
_DIGITS: Final = 12  # Rounding to this many digits makes a share in percent exact: 99.9 / 100 is not 0.999.
_HEAD: Final = (
    "Copy the section into your own file of settings, or name this one with --config or KP_CONFIG if you have none.",
    "In brackets: what to expect of other traces of the same kind, in 19 of 20 cases.",
)

_OF_THEMSELVES: Final = (
    "a trace counts as good if it says so itself (metadata.success), a part of its score; --labels is independent of that"
)
_GATED: Final = 'a gate decided, so a threshold has no effect until routing.gate is "score"'


def _share(text: str) -> float:
    try:
        share = round(float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1), _DIGITS)
    except ValueError:
        share = 0.0
    # Distinguishing a smaller share from none, or a larger one from all, takes more traces than anyone has.
    if not _LEAST_SHARE <= share <= 1 - _LEAST_SHARE:
        raise click.BadParameter("expected a share between 0.1% and 99.9%, such as 20% or 0.2")
    return share


@click.command(epilog="Example: kp-scorer calibrate traces.jsonl --accept 20% --output thresholds.toml")
@click.option("--accept", type=_share, metavar="SHARE", help="Share of each domain's traces to accept, such as 20%.")
@click.option("--precision", type=_share, metavar="SHARE", help="Share of the accepted traces to be good, such as 90%.")
@labels_option
@click.option("--output", metavar="FILE", type=click.Path(), default="-", help="New file to write; by default stdout.")
@gathering_options
def calibrate(accept: float | None, precision: float | None, output: str, gathered: Gathered, settings: Settings) -> bool:
    """Suggest thresholds by domain from the traces or decisions in FILE, or from the decisions in the ledger.

    Writes settings as TOML, to copy into yours, or to use with --config or KP_CONFIG; variables such as KP_SCORING_THRESHOLD
    override them. Decisions keep their scores.

    --labels names a file that says which traces were good, JSON Lines such as {"trace_id": "kp:trace:…", "good": true}. Without
    it, --stored uses the labels of `kp-scorer label` and late outcomes; for traces in FILE, metadata.success is the label,
    although it is a part of their scores. If sampled traces (review.sample) have labels, no other labels count, because people
    label what they happen to see. With --accept, --labels and traces in FILE, a note compares the highest scores with the set
    that `keep --best` chooses, at the same share.

    Each interval holds for other traces of the same kind in 19 of 20 cases. Domains with too few traces (fewer than 62 to
    accept 20%) share one threshold with all future domains; those that have a threshold in the settings keep it.
    """
    if (accept is None) == (precision is None):
        raise click.UsageError("expected either --accept or --precision")
    target = Target("precision", precision or 0.0) if accept is None else Target("accept", accept)
    if output != "-" and os.path.lexists(output):
        # Do not overwrite the file: it may hold the settings of all workers.
        raise click.BadParameter(escaped(f"{output} is there already; name a new file"), param_hint="--output")
    notes: list[str] = []
    calibration = calibrate_samples(_samples(gathered, target, settings, notes), target, settings.scoring.thresholds)
    if gathered.are_of_domains:
        # Traces of chosen domains say nothing about the threshold of all other domains.
        calibration = calibration._replace(other_domains=Cohort(0, lack="too_few"))
    scoring = with_thresholds(calibration, settings.scoring)
    if not any(cohort.suggestion for cohort in (*calibration.domains.values(), calibration.other_domains)):
        print_note(f"nothing to suggest: {_lack(calibration.other_domains, target)}")
        return True
    notes += (escaped(f"change this too: scoring.{clash}") for clash in scoring.reviews_above())
    for note in [*_notes(target, calibration, scoring), *notes]:
        print_note(note)
    with open_output(output, is_new=True) as write:
        write(as_toml(scoring, calibration, target, notes))
    return False


def _samples(gathered: Gathered, target: Target, settings: Settings, notes: list[str]) -> dict[str, Sample]:
    """Return samples of decisions with labels, by domain; print notes on them, and add those for the file to ``notes``."""
    needs_labels = gathered.labels is not None or target.of == "precision"
    if needs_labels and gathered.is_stored and not has_stored_labels(settings, gathered.labels):
        # Check this first, before all decisions are read.
        raise click.UsageError(_NO_LABEL)
    producers, caveats = {"--namespace": Counter[str](), "--agent": Counter[str]()}, dict[str, None]()
    with Candidates() as candidates:
        samples = samples_of(_labelled(gathered, producers, caveats, candidates), settings.scoring.aliases)
        if gathered.labels and target.of == "accept" and candidates.runs:
            print_note(compared(candidates, target.share, gathered.labels))
    notes += caveats
    total, labelled = producers["--agent"].total(), sum(sample.labelled for sample in samples.values())
    if not labelled and needs_labels:
        raise click.UsageError(_NO_LABEL)
    for option, traces in producers.items():
        # Every producer can shift the suggestion by traces that are made for that purpose. Names are printed as JSON, because
        # producers choose them, and a name may look like several, or like none.
        shares = [f"{json.dumps(name)} {count / total:.1%}" for name, count in traces.most_common(_NAMED)]
        if len(shares) > 1:
            print_note(f'traces by {option}, "" being those without: {", ".join(shares)}')
    if 0 < labelled < total:
        print_note(f"{labelled} of {total} traces have a label")
    return samples


def _labelled(
    gathered: Gathered, producers: Mapping[str, Counter[str]], caveats: dict[str, None], candidates: Candidates
) -> Iterator[tuple[Decision, bool | None]]:
    """Yield each decision with its label, or None; count its producers, and collect caveats and traces of a file."""
    for decision, label, trace, _, named_task in gathered.traces:
        if trace and gathered.labels:
            success, task = trace.metadata.success, hash(named_task)
            run = Run(trace.id, decision.domain, success and not decision.is_guarded, success, task, decision.score)
            candidates.add(run, candidates.vector_of(trace))
        if decision.gate:
            caveats[_GATED] = None
        producers["--namespace"][namespace_of(decision.trace_id)] += 1
        producers["--agent"][decision.agent_id or ""] += 1
        if gathered.labels is None and trace:
            # Ignore that a trace was sampled, because every trace has this label.
            caveats[_OF_THEMSELVES] = None
            yield decision.model_copy(update={"sampled": None}), trace.metadata.success
        else:
            yield decision, label


def as_toml(scoring: ScoringSettings, calibration: Calibration, target: Target, notes: Iterable[str]) -> str:
    """Return the file of settings, with comments: these notes, and the basis of each threshold."""
    goal = "the traces of each domain to be accepted" if target.of == "accept" else "the accepted traces to be good"
    which = "" if calibration.other_domains_are_all else "without one of their own "
    lines = [
        *(f"# {line}" for line in (f"What kp-scorer calibrate suggests for {target.percents} of {goal}.", *_HEAD, *notes)),
        "",
        "[scoring]",
        f"# All domains {which}together, {_basis(calibration.other_domains)}.",
        f"threshold = {scoring.threshold}",
    ]
    if scoring.thresholds:
        lines += ["", "[scoring.thresholds]"]
    for domain, threshold in scoring.thresholds.items():
        # TOML writes texts as JSON does, except for characters that terminals act on.
        key = domain if re.fullmatch(r"[A-Za-z0-9_-]+", domain) else escaped(json.dumps(domain, ensure_ascii=False))
        lines += [f"# {_basis(calibration.domains.get(domain))}.", f"{key} = {threshold}"]
    return "".join(f"{line}\n" for line in lines)


def _basis(cohort: Cohort | None) -> str:
    if not cohort or not cohort.suggestion:
        return f"{cohort.traces if cohort else 'no'} traces: as it was"
    suggestion = cohort.suggestion
    shares = [(suggestion.accepted, "accepted"), (suggestion.precision, "of these good")]
    outlook = ", ".join(f"{share.value:.1%} ({share.interval}) {words}" for share, words in shares if share)
    return f"{cohort.traces} traces: threshold ({suggestion.low:.3f}-{suggestion.high:.3f}), {outlook}"


def _notes(target: Target, calibration: Calibration, scoring: ScoringSettings) -> Iterator[str]:
    """Yield notes on the domains without a suggestion of their own."""
    # Nothing was suggested for domains with too few traces, so they are among the thresholds only if the settings have them.
    few = sum(cohort.lack == "too_few" and domain not in scoring.thresholds for domain, cohort in calibration.domains.items())
    if few and calibration.other_domains.traces:
        whose = "of all domains together" if calibration.other_domains_are_all else "of theirs together"
        yield f"domains with fewer than {target.least_traces} traces{_counted(target)}: {few}; they get one threshold, {whose}"
    for domain, cohort in calibration.domains.items():
        if cohort.lack and domain in scoring.thresholds:
            yield f"{escaped(domain)}: {_lack(cohort, target)}; it stays at {scoring.thresholds[domain]:g}"
    if few and calibration.other_domains.lack:
        yield f"{_OTHER_DOMAINS}: {_lack(calibration.other_domains, target)}; it stays at {scoring.threshold:g}"
    yield (
        f"to be within {100 * _NEAR:g} points of {target.percents} in 19 of 20 cases takes "
        f"{target.traces_for(_NEAR):,} {'traces' if target.of == 'accept' else 'accepted traces with labels'} a domain"
    )


def _lack(cohort: Cohort, target: Target) -> str:
    if cohort.lack == "too_few":
        return f"fewer than {target.least_traces} traces{_counted(target)} are too few for {target.percents}"
    if cohort.lack == "too_alike":
        fewer, more = cohort.nearest
        return f"scores are too alike to accept {target.percents}: the nearest thresholds accept {fewer:.1%} and {more:.1%}"
    if target.of == "accept":
        return f"guards reject so many that no threshold accepts {target.percents}"
    return f"no threshold with {target.least_accepted} labelled traces above it has {target.percents} good ones"


def _counted(target: Target) -> str:
    return " with labels" if target.of == "precision" else ""
