"""``kp-scorer forward``: hand decisions, or the spans of their runs, on to another program."""

import json
import os
from functools import partial
from pathlib import Path
from typing import get_args

import click

from kp_scorer.cli.options import choice_option, follow_option, group_option, outcome_option, service_options
from kp_scorer.cli.output import print_note
from kp_scorer.client import read_decisions
from kp_scorer.client.forwarding import Forwarder, Receiver
from kp_scorer.decision import Decision, DecisionKind
from kp_scorer.files import open_regular
from kp_scorer.local.processes import stopped_by_signals
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.runs import ClaimedRun


@click.command(epilog="Example: WEBHOOK_SECRET=… kp-scorer forward --to webhook --url https://hooks.example.org/kp --follow")
@choice_option("--to", "receiver", choices=get_args(Receiver), required=True, help="Kind of receiver.")
@click.option(
    "--url",
    metavar="URL",
    default="",
    help="Address of the receiver; by default, except for a webhook, that in LANGFUSE_HOST or OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@outcome_option
@click.option(
    "--share-of-rest",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="With otlp-spans, also forward this share of the runs that are not accepted: 0.3, for example, is one run in 3.",
)
@group_option
@follow_option
@click.option(
    "--dead-letters",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default="not-forwarded.jsonl",
    show_default=True,
    help="File to append decisions to that the receiver refuses.",
)
@service_options
def forward(
    receiver: Receiver,
    url: str,
    outcome: DecisionKind | None,
    share_of_rest: float,
    group: str,
    follow: bool,
    dead_letters: Path,
    settings: Settings,
) -> None:
    """Consume decisions and forward each at least once: it is removed from its queue once the receiver has it.

    webhook: posts the decision as JSON, signed with WEBHOOK_SECRET as Standard Webhooks prescribe.

    langfuse: posts a score for the run's trace, with the keys in LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY.

    otlp: posts an event gen_ai.evaluation.result, with the headers in OTEL_EXPORTER_OTLP_HEADERS, under the agent's span if
    `serve` received it.

    otlp-spans: posts, with the same headers, the spans of accepted runs, which `serve` keeps for serve.keep_spans_s. With
    --share-of-rest, it also posts those of a sample of the other runs; their attribute SampleRate says how many runs each one
    stands for.

    While the receiver is away, decisions wait in their queue. One that it refuses is appended to the file of --dead-letters.
    """
    if receiver == "otlp-spans" and outcome == "revised":
        raise click.UsageError("--outcome: expected another one, as the first decision on a run says where its spans go")
    if share_of_rest and receiver != "otlp-spans":
        raise click.UsageError("--share-of-rest: expected --to otlp-spans")
    stopping = stopped_by_signals()
    refused, are_spans = 0, receiver == "otlp-spans"
    with Store.open(settings) as store:
        forwarder = Forwarder(receiver, url, os.environ, store, round(1 / share_of_rest) if share_of_rest else 0)
        for decision in read_decisions(outcome, group=group, follow=follow, stopping=stopping, settings=settings):
            refusal = forwarder.forward(decision, stopping)
            if refusal is None:
                # Leaving the loop here does not acknowledge the decision.
                break
            if refusal:
                refused += 1
                run = forwarder.through_outages(partial(store.runs.ended, decision.trace_id), stopping) if are_spans else None
                _dead_letter(dead_letters, receiver, refusal, decision, run)
            if are_spans:
                forwarder.through_outages(partial(store.runs.forget, decision.trace_id, "forwarded"), stopping)
    units = "runs" if are_spans else "decisions"
    print_note(f"forwarded {forwarder.count} {units}" + (f", {refused} refused: see {dead_letters}" if refused else ""))


def _dead_letter(file: Path, receiver: Receiver, reason: str, decision: Decision, run: ClaimedRun | None) -> None:
    print_note(f"{decision.trace_id}: refused with {reason}")
    row = {"to": receiver, "reason": reason, "decision": decision.model_dump(mode="json")}
    if run and run.spans:
        row["spans"] = run.export.decode("utf-8", "backslashreplace")
    try:
        with open_regular(file, "a+b", follow=False) as lines:
            # If a full disk has cut off the last line, begin a new one, as that decision comes again.
            if lines.tell():
                lines.seek(-1, os.SEEK_END)
            start = "\n" if lines.read(1) not in (b"", b"\n") else ""
            lines.write(f"{start}{json.dumps(row)}\n".encode())
            lines.flush()
            # Once the decision is acknowledged, which comes next, this file is the only place that has it.
            os.fsync(lines.fileno())
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}", param_hint="--dead-letters") from None
