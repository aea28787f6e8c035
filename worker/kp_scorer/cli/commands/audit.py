"""``kp-scorer audit``: check the decisions against the novelty logs."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import click

from kp_scorer.cli.display import progress
from kp_scorer.cli.options import service_options, since
from kp_scorer.cli.output import note_damaged, print_note, print_row
from kp_scorer.decision import Decision
from kp_scorer.gate.gate_audit import audit_gate
from kp_scorer.novelty.log import Place, Window
from kp_scorer.novelty.pins import audit_pinned
from kp_scorer.novelty.verification import DecidedTrace, left_since
from kp_scorer.novelty.verification import audit as audit_log
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.novelty_log import RedisLog

_UNCHECKED: Final = 5  # The exit code of an audit that could check nothing, or not everything that it was asked to check.
_EVER: Final = Place(0, 0)


def _since(text: str) -> Place:
    """Return the place of the entry that a text names, or the first place at its time."""
    with suppress(ValueError):
        return Place.parse(text)
    return Place(int(since(text).timestamp() * 1_000), 0)


@click.command(epilog="Example: kp-scorer audit --sample 1000")
@click.option("--sample", type=click.IntRange(min=1), help="Check this many entries of each log, chosen at random.")
@click.option(
    "--since",
    type=_since,
    default="0-0",
    metavar="ENTRY|TIME",
    help="Check entries after ENTRY, or from TIME on: 2026-11-30T12:00:00, in UTC, or an age such as 24h or 7d.",
)
@service_options
def audit(sample: int | None, since: Place, settings: Settings) -> int:
    """Recompute each decision's novelty, its similarity to pinned traces and what it added to the kept ones; print differences.

    Prints a line for each difference. Exits with 1 if there is any, or if an entry or a record is damaged; with 5 if nothing
    could be checked, or if entries that --since asks for have left the log. Decisions without an embedder have no entry in any
    log, and are not checked.

    A note on each log names the entry for the next --since; if there are several logs, take the earliest. A later audit from
    there skips traces that are in flight now; choose an earlier --since to check them too.
    """
    totals = _Totals()
    with Store.open(settings) as store:
        logs = store.novelty_logs()
        for log in logs:
            _audit_log(store, log, settings.novelty.window(), sample, since, totals)
        for facts in store.all_facts():
            # Audit what the traces of a space added to the kept ones.
            report = audit_gate(list(facts.all()), list(facts.all_kept()), store.ledger.decided, facts.bounds)
            totals.add(facts.space, report.differences, report.agreeing)
            print_note(
                f"{facts.space}, gate: {report.agreeing} agree, {len(report.differences)} differ, "
                f"{report.undecided} undecided, {report.beyond} beyond what is still stored"
            )
        damaged = note_damaged(store.ledger.damaged)
    if not totals.checked:
        no_log = "there is no novelty log, as where no worker has an embedder"
        no_decision = "no entry that was looked at has a decision that can be recomputed"
        print_note(f"nothing was checked: {no_decision if logs else no_log}")
    if totals.differing or damaged:
        return 1
    return 0 if totals.checked and not totals.has_left else _UNCHECKED


@dataclass(slots=True)
class _Totals:
    """The results of the audits of all logs."""

    checked: int = 0
    differing: int = 0
    has_left: bool = False  # True if entries of the requested range have left the log.

    def add(self, space: str, differences: Sequence[dict[str, Any]], agreeing: int) -> None:
        """Print the differences in a space, and count them with those that agree."""
        for row in differences:
            print_row({"space": space, **row})
        self.differing += len(differences)
        self.checked += agreeing + len(differences)


def _audit_log(store: Store, log: RedisLog, window: Window, sample: int | None, since: Place, totals: _Totals) -> None:
    """Audit one log; print a summary, and add its figures to the totals. ``window`` is for a log that notes none."""
    # Keyed by trace id, because a trace may have entries in several logs, or several in one.
    pinned: dict[str, Decision] = {}

    def decided(trace_ids: Sequence[str]) -> list[DecidedTrace | None]:
        traces = store.ledger.decided(trace_ids)
        pinned.update((each.decision.trace_id, each.decision) for each in traces if each and each.decision.pinned)
        return traces

    entries = list(log.entries())
    with progress("audited") as advance:
        # Use the window that the log was written with, whatever the settings are here.
        report = audit_log(entries, decided, log.info().window or window, advance, sample, since)
    totals.add(log.space, [difference._asdict() for difference in report.differences], report.agreeing)
    totals.differing += report.damaged
    left = left_since(since, entries[0].place) if entries else ""
    totals.has_left = totals.has_left or (since > _EVER and bool(left))
    share = f"{report.entries} of " if report.entries < len(entries) else ""
    print_note(
        f"{log.space}: {share}{len(entries)} entries, {report.agreeing} agree, {len(report.differences)} differ, "
        f"{report.undecided} undecided, {report.beyond} beyond what the log still holds, {report.damaged} damaged"
        f"{f', {left} unchecked that have left the log' if left else ''}"
        f"{f'; next time --since {report.last}' if report.last else ''}"
    )
    if pins := [each for each in pinned.values() if each.novelty.space == log.space]:
        agreeing, differences, unchecked = audit_pinned(pins, entries, store.pinned_sets(log.space))
        totals.add(log.space, differences, agreeing)
        print_note(f"pinned sets: {agreeing} agree, {len(differences)} differ, {unchecked} cannot be checked any more")
