"""``kp-scorer calibrate``: suggest thresholds from traces of one's own."""

import sys
from collections.abc import Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click

from kp_scorer.analysis.calibration import HELD_BACK, Calibration, Cohort, samples_of
from kp_scorer.analysis.calibration import calibrate as calibrated
from kp_scorer.analysis.target import Target
from kp_scorer.characters import escaped
from kp_scorer.cli.calibration_table import REST, held_back_table, suggestions_table
from kp_scorer.cli.figures import percent
from kp_scorer.cli.gathering import Gathered, gathering_options
from kp_scorer.cli.labels import read_labels
from kp_scorer.cli.options import Command, has_config, overruled
from kp_scorer.cli.output import console, print_text, say
from kp_scorer.cli.thresholds_file import Thresholds, as_toml, head_of, thresholds_of
from kp_scorer.scoring import DEFAULT_THRESHOLD
from kp_scorer.settings import ScoringSettings, Settings

_NEAR: Final = 0.02
"""A share that is further off than this in the very traces that it was chosen for is worth a word."""
_LEAST_SHARE: Final = 0.001
_DIGITS: Final = 12
"""To so many a share in percents is the share that it says: 99.9 / 100 is not 0.999."""


class _Share(click.ParamType[float]):
    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = round(float(text.removesuffix("%")) / (100 if text.endswith("%") else 1), _DIGITS)
        except ValueError:
            share = 0.0
        # To tell a smaller one from nothing, or a larger one from all, takes more traces than anyone has.
        if not _LEAST_SHARE <= share <= 1 - _LEAST_SHARE:
            self.fail("expected a share between 0.1% and 99.9%, such as 20% or 0.2", param, ctx)
        return share


def _target_options(command: Command) -> Command:
    """Let a command be told what to reach, and pass it the ``target``."""

    @click.option("--accept", type=_Share(), metavar="SHARE", help="How many traces of a domain to accept: 20%.")
    @click.option("--precision", type=_Share(), metavar="SHARE", help="How many of the accepted traces are to be good: 90%.")
    @wraps(command)
    def with_target(*args: Any, accept: float | None, precision: float | None, **kwargs: Any) -> None:
        if accept is not None and precision is None:
            target = Target("accept", accept)
        elif precision is not None and accept is None:
            target = Target("precision", precision)
        else:
            raise click.UsageError("expected either --accept or --precision")
        command(*args, target=target, **kwargs)

    return with_target


def _read(_: click.Context, __: click.Parameter, file: Path | None) -> Mapping[str, bool] | None:
    return read_labels(file) if file else None


def _unless_there(_: click.Context, __: click.Parameter, file: Path | None) -> Path | None:
    try:
        if file and file.exists():
            # It may be the settings that all workers run by.
            raise click.BadParameter(escaped(f"{file} is there already; name a new file"))
    except OSError as error:
        raise click.BadParameter(escaped(f"{file}: {error.strerror}")) from None
    return file


@click.command(epilog="Example: kp-scorer calibrate traces.jsonl --accept 20% --output thresholds.toml")
@_target_options
@click.option("--labels", callback=_read, type=click.Path(path_type=Path), help="File that says which traces were good.")
@click.option("--output", callback=_unless_there, type=click.Path(path_type=Path), help="Where to write, in place of stdout.")
@gathering_options
def calibrate(
    target: Target, labels: Mapping[str, bool] | None, output: Path | None, gathered: Gathered, settings: Settings
) -> None:
    """Suggest thresholds by domain from the traces or decisions in FILE, or from the decisions that the ledger holds.

    Writes settings as TOML, to be taken over into yours, or for --config or KP_CONFIG if you have none. Scores are taken as
    they were decided.

    Which traces were good --labels says: JSON Lines {"trace_id": "kp:trace:…", "good": true}, or CSV with these two columns.
    Without it, it is metadata.success of the traces in FILE, which is itself a part of their scores.

    An interval holds 19 of 20 cases. The suggestion is made of all traces; what it does to others is tried beforehand, on
    30% of each domain. Domains with too few traces, fewer than 62 to accept 20%, get one threshold together, as do those to
    come; but those that have one in the settings keep it.
    """
    known = {trace_id: trace.metadata.success for trace_id, trace in gathered.traces.items()} if labels is None else labels
    if not gathered.decisions:
        say(f"no decisions in {gathered.source}")
        sys.exit(1)
    labelled = sum(decision.trace_id in known for decision in gathered.decisions)
    if not labelled and (labels is not None or target.of == "precision"):
        raise click.UsageError("no trace is known to be good or not: expected traces in FILE, or --labels on those in it")
    if 0 < labelled < len(gathered.decisions):
        say(f"{labelled} of {len(gathered.decisions)} traces have a label")
    samples = samples_of(gathered.decisions, known, settings.scoring.aliases)
    found = calibrated(samples, target, settings.scoring.thresholds)
    thresholds = thresholds_of(found, settings.scoring)
    has_labels = labelled > 0
    out = console()
    out.print(suggestions_table(found, thresholds, has_labels=has_labels))
    if not (found.rest.suggestion or any(cohort.suggestion for cohort in found.domains.values())):
        say(f"nothing to suggest: {_lack(found.rest, target)}")
        sys.exit(1)
    say(f"tried on {HELD_BACK:.0%} of each domain's traces, by thresholds that the others lead to:")
    out.print(held_back_table(found, has_labels=has_labels))
    clashes = list(_clashes(settings.scoring, thresholds))
    where = str(output) if output else "these thresholds"
    for note in [*_notes(target, found, thresholds), *clashes, *overruled(where, ("scoring.threshold", "scoring.thresholds"))]:
        say(note)
    head = [*head_of(target, is_whole=_says_nothing_else(settings.scoring) and not has_config()), *clashes]
    _write(as_toml(thresholds, found, head), output)
    if gathered.refused:
        sys.exit(1)


def _notes(target: Target, found: Calibration, thresholds: Thresholds) -> Iterator[str]:
    """What the tables do not say, or not loud enough."""
    too_few = [domain for domain, cohort in found.domains.items() if cohort.lack == "too_few"]
    # Nothing was suggested for these, so that they are there only if they are set.
    kept = [domain for domain in too_few if domain in thresholds.domains]
    few = len(too_few) - len(kept)
    if few:
        whose = "of all domains together" if found.rest_is_all else "of theirs together"
        yield f"{few} with fewer than {target.least_traces} traces{_counted(target)}: they get one threshold, {whose}"
    for domain in kept:
        yield f"{escaped(domain)}: {_lack(found.domains[domain], target)}; it stays at {thresholds.of(domain):g}"
    named = [(escaped(domain), thresholds.of(domain), cohort) for domain, cohort in found.domains.items()]
    for name, threshold, cohort in [*named, (REST, thresholds.default, found.rest)] if few else named:
        if cohort.lack == "out_of_reach":
            yield f"{name}: {_lack(cohort, target)}; it stays at {threshold:g}"
        elif cohort.suggestion and target.of == "accept" and abs(cohort.suggestion.accepted.value - target.share) > _NEAR:
            share = percent(cohort.suggestion.accepted.value)
            yield f"{name}: {share} is as near to {target.percents} as it gets: too many of its traces have one score"
        if cohort.suggestion and not cohort.held_back:
            yield f"{name}: without the traces held back {_lack(cohort, target)}"
    yield (
        f"to be within {100 * _NEAR:g} points of {target.percents} in 19 of 20 cases takes "
        f"{target.traces_for(_NEAR):,} {'traces' if target.of == 'accept' else 'accepted traces with labels'} a domain"
    )


def _lack(cohort: Cohort, target: Target) -> str:
    if cohort.lack == "too_few":
        return f"fewer than {target.least_traces} traces{_counted(target)} are too few for {target.percents}"
    return f"no threshold with {target.least_accepted} labelled traces above it has {target.percents} good ones"


def _counted(target: Target) -> str:
    return " with labels" if target.of == "precision" else ""


def _clashes(scoring: ScoringSettings, thresholds: Thresholds) -> Iterator[str]:
    """What the settings in force say that the new thresholds do not go with."""
    for clash in scoring.reviews_above(thresholds.default, thresholds.domains):
        yield escaped(f"change this too: scoring.{clash}")


def _says_nothing_else(scoring: ScoringSettings) -> bool:
    """Whether all but the thresholds is as it is by default."""
    return scoring.model_copy(update={"threshold": DEFAULT_THRESHOLD, "thresholds": {}}) == ScoringSettings()


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print_text(text)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise click.BadParameter(escaped(f"{output}: {error.strerror}"), param_hint="--output") from None
    say(f"wrote {output}")
