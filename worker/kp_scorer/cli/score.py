"""``kp-scorer score``: score a file offline, in process."""

import sys

import click

from kp_scorer.cli.input import open_input, read_traces
from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import print_json, progress, refused, say, say_if_unmeasured
from kp_scorer.decision import Decision
from kp_scorer.errors import InvalidTrace, TraceConflict
from kp_scorer.offline import offline_decider
from kp_scorer.settings import EmbeddingSettings, Settings


@click.command(epilog="Example: kp-scorer score traces.jsonl > decisions.jsonl")
@click.argument("file", metavar="FILE|-")
@click.option("--embedder", type=click.Choice(["auto", "none"]), help="none: score with a novelty of 0.5.")
@settings_options
def score(file: str, embedder: str | None, settings: Settings) -> None:
    """Score the traces in FILE (- for standard input) in order, offline: no Redis, no broker, an empty cache to start with.

    Prints the decisions as JSON Lines in the order of the input. Invalid lines are named by number and field;
    the others are scored.
    """
    if embedder:
        settings = settings.model_copy(
            update={"embedding": EmbeddingSettings.model_validate(settings.embedding.model_dump() | {"embedder": embedder})}
        )
    limits = settings.limits
    with open_input(file) as stream, progress("scored") as advance:
        lines = list(read_traces(stream, limits))
        decider = offline_decider(settings) if lines else None
        scored = 0
        for done, line in enumerate(lines, start=1):
            if isinstance(line.trace, InvalidTrace):
                print_json(refused(line, line.trace))
            else:
                assert decider is not None
                (decided,) = decider.decide([line.trace])
                if isinstance(decided, Decision):
                    if not scored:
                        say_if_unmeasured(decided)
                    scored += 1
                    print_json(decided.model_dump(mode="json"))
                else:
                    # A ledger in memory knows of no other workers and of no deaths.
                    assert isinstance(decided, TraceConflict)
                    print_json(refused(line, decided))
            advance(done, len(lines))
    if not lines:
        say(f"no traces in {file}")
    if scored < len(lines):
        sys.exit(1)
