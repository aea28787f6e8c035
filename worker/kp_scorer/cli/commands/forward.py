"""``kp-scorer forward``: hand decisions on to where people look."""

import json
import os
import signal
from pathlib import Path
from threading import Event
from typing import get_args

import click

from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_note
from kp_scorer.client import read_decisions
from kp_scorer.client.forwarding import Forwarder, Receiver
from kp_scorer.decision import KINDS, Decision, DecisionKind
from kp_scorer.files import open_regular
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: WEBHOOK_SECRET=… kp-scorer forward --to webhook --url https://hooks.example.org/kp --follow")
@click.option("--to", "receiver", type=click.Choice(get_args(Receiver)), required=True, help="What receives them.")
@click.option(
    "--url", default="", help="Its address; for langfuse and otlp by default in LANGFUSE_HOST, OTEL_EXPORTER_OTLP_ENDPOINT."
)
@click.option("--outcome", type=click.Choice(KINDS), help="Only decisions with this outcome, or revisions.")
@click.option("--group", default="", help="The consumer group to read streams as.")
@click.option("--follow", is_flag=True, help="Wait for more decisions.")
@click.option(
    "--dead-letters",
    type=click.Path(dir_okay=False, path_type=Path),
    default="not-forwarded.jsonl",
    show_default=True,
    help="The file for decisions that the receiver refuses.",
)
@service_options
def forward(
    receiver: Receiver, url: str, outcome: DecisionKind | None, group: str, follow: bool, dead_letters: Path, settings: Settings
) -> None:
    """Consume decisions and hand each on, at least once: it is removed from its queue once the receiver has it.

    webhook posts the decision as JSON, signed with WEBHOOK_SECRET as Standard Webhooks are. langfuse posts a score to the run's
    trace, with LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY. otlp posts an event gen_ai.evaluation.result, under the span of the
    agent if `serve` had it, with OTEL_EXPORTER_OTLP_HEADERS.

    While the receiver is away decisions wait in their queue. One that it refuses is added to --dead-letters.
    """
    stopping = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    forwarded = refused = 0
    with Store.open(settings) as store:
        forwarder = Forwarder(receiver, url, os.environ, store)
        for decision in read_decisions(outcome, group=group, follow=follow, stopping=stopping, settings=settings):
            refusal = forwarder.forward(decision, stopping)
            if refusal is None:
                # Outside of the loop it is not acknowledged.
                break
            forwarded, refused = forwarded + (not refusal), refused + bool(refusal)
            if refusal:
                _dead_letter(dead_letters, receiver, refusal, decision)
    print_note(f"forwarded {forwarded} decisions" + (f", {refused} refused: see {dead_letters}" if refused else ""))


def _dead_letter(file: Path, receiver: Receiver, reason: str, decision: Decision) -> None:
    print_note(f"{decision.trace_id}: refused with {reason}")
    row = {"to": receiver, "reason": reason, "decision": decision.model_dump(mode="json")}
    try:
        with open_regular(file, "a", follow=False, encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            # It is acknowledged next, and then nowhere else.
            os.fsync(lines.fileno())
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}", param_hint="--dead-letters") from None
