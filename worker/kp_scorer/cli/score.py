"""``kp-scorer score``: score a file offline, in process."""

import sys
from collections.abc import Iterator, Sequence

import click

from kp_scorer.cli.input import Line
from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import print_json, progress, refused, say, say_if_unmeasured
from kp_scorer.cli.reading import Reading
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.errors import InvalidTrace, TraceConflict
from kp_scorer.offline import decide_offline, offline_decider
from kp_scorer.settings import EmbeddingSettings, Settings


@click.command(epilog="Example: kp-scorer score traces.jsonl.gz > decisions.jsonl")
@click.argument("file", metavar="FILE|-")
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
    decider: Decider | None = None
    done = scored = 0
    with progress("scored") as advance:
        for batch in reading.batches():
            decider = decider or offline_decider(settings)
            for line, found in _decided(decider, batch):
                done += 1
                if isinstance(found, Decision):
                    if not scored:
                        say_if_unmeasured(found)
                    scored += 1
                    print_json(found.model_dump(mode="json"))
                else:
                    print_json(refused(line, found))
            advance(done, *reading.total())
        if done:
            advance(done, done)
    if not done:
        say(f"no traces in {file}")
    if scored < done:
        sys.exit(1)


def _decided(decider: Decider, batch: Sequence[Line]) -> Iterator[tuple[Line, Decision | InvalidTrace | TraceConflict]]:
    """Give each line with its decision, or why it has none."""
    decided = decide_offline(decider, [line.trace for line in batch if not isinstance(line.trace, InvalidTrace)])
    for line in batch:
        if isinstance(line.trace, InvalidTrace):
            yield line, line.trace
            continue
        found = next(decided)
        # A ledger in memory knows of no other workers and of no deaths.
        assert isinstance(found, Decision | TraceConflict)
        yield line, found
