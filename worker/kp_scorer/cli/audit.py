"""``kp-scorer audit``: check every decision against the novelty log."""

import sys
from typing import Final

import click

from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, progress, say
from kp_scorer.novelty.audit import audit as audit_log
from kp_scorer.scoring import UNKNOWN_NOVELTY
from kp_scorer.settings import Settings
from kp_scorer.store import Store

_SHOWN_EVERY: Final = 1_000


@click.command(epilog="Example: kp-scorer audit && echo every decision is what the log gives")
@service_options
def audit(settings: Settings) -> None:
    """Recompute every decision's novelty from the log and report those that differ.

    Prints a JSON line for each difference; exits 1 if there is any. Says what it could not check: decisions that were made
    without an embedder, which have no entry in any log.
    """
    checked = differing = 0
    with Store.open(settings) as store:
        logs = store.novelty_logs()
        for log in logs:
            with progress("audited") as advance:
                # By the window that the log was written with, whatever the settings say here.
                window = log.info().window or settings.novelty.window()
                report = audit_log(list(log.entries()), store.ledger.decided, window, advance)
            for difference in report.differences:
                print_json({"space": log.space, **difference._asdict()})
            differing += len(report.differences)
            checked += report.agreeing + len(report.differences)
            say(
                f"{log.space}: {report.entries} entries, {report.agreeing} agree, {len(report.differences)} differ, "
                f"{report.undecided} undecided, {report.beyond} beyond what the log still holds"
            )
        unmeasured = _count_unmeasured(store)
    if unmeasured:
        say(
            f"{unmeasured} decisions were made without an embedder: "
            f"they have no entry in any log, so their novelty of {UNKNOWN_NOVELTY:g} cannot be checked"
        )
    if not checked:
        why = (
            "no entry has a decision that can be recomputed"
            if logs
            else "there is no novelty log, as where no worker has an embedder"
        )
        say(f"nothing was checked: {why}")
    if differing:
        sys.exit(1)


def _count_unmeasured(store: Store) -> int:
    """How many decisions were made without an embedder, of those that the ledger keeps: half a minute for a million."""
    count = 0
    with progress("looked for decisions without an embedder") as advance:
        for done, found in enumerate(store.ledger.all_decided(), 1):
            count += found.decision.novelty.source == "no_embedder"
            if done % _SHOWN_EVERY == 0:
                advance(done, None)
    return count
