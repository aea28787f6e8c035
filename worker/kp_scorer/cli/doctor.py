"""``kp-scorer doctor``: whether all is set up as it should be."""

import sys

import click

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.cli.diagnosis import Patient, diagnose
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, say
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: kp-scorer doctor")
@service_options
def doctor(settings: Settings) -> None:
    """Look at settings, Redis, the broker, queues, workers, clocks and the embedder, and say what to do about what is wrong.

    A JSON line a finding: ok, advice, or wrong. Exits with 0 if nothing is wrong, else 1. It changes nothing: a model
    that was not converted yet is left to the first worker.
    """
    is_well = True
    with Store.open(settings) as store, make_celery(settings) as app:
        for finding in diagnose(Patient(settings, store, app)):
            print_json(finding._asdict())
            say(f"{finding.check}: {'' if finding.state == 'ok' else finding.state + ': '}{finding.detail}")
            is_well = is_well and finding.state != "wrong"
    if not is_well:
        sys.exit(1)
