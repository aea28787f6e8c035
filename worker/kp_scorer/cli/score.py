"""``kp-scorer score``: score a file offline, in process."""

import sys

import click

from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import print_json, refused, say
from kp_scorer.cli.reading import Reading
from kp_scorer.cli.scoring import score_lines
from kp_scorer.decision import Decision
from kp_scorer.settings import EmbeddingSettings, Settings


@click.command(epilog="Example: kp-scorer score traces.jsonl.gz > decisions.jsonl")
@click.argument("file", metavar="FILE|-", type=click.Path(allow_dash=True))
@click.option("--embedder", type=click.Choice(["auto", "none"]), help="none: score with a novelty of 0.5.")
@settings_options
def score(file: str, embedder: str | None, settings: Settings) -> None:
    """Score the traces in FILE (- for standard input) in order, offline: no Redis, no broker, an empty cache to start with.

    FILE is JSON Lines or one JSON document, and may be gzipped. Prints the decisions as JSON Lines in the order of the input,
    as it comes in. Invalid lines are named by number and field; the others are scored.
    """
    if embedder:
        settings = settings.model_copy(
            update={"embedding": EmbeddingSettings.model_validate(settings.embedding.model_dump() | {"embedder": embedder})}
        )
    reading = Reading(file, settings.limits, settings.worker.batch_size)
    done = scored = 0
    for line, found in score_lines(reading.batches(), reading.total, settings):
        done += 1
        if isinstance(found, Decision):
            scored += 1
            print_json(found.model_dump(mode="json"))
        else:
            print_json(refused(line, found))
    if not done:
        say(f"no traces in {file}")
    if scored < done:
        sys.exit(1)
