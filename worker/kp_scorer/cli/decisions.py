"""``kp-scorer decisions``: take decisions off the results queues."""

import signal
from threading import Event
from typing import Final, cast, get_args

import click

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import open_results, read_elsewhere
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, say
from kp_scorer.decision import Outcome
from kp_scorer.settings import Settings

_POLL_S: Final = 0.2


@click.command(epilog="Example: kp-scorer decisions --outcome accepted --follow")
@click.option("--outcome", type=click.Choice(get_args(Outcome)), help="Only the queue of this outcome.")
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many.")
@click.option("--follow", is_flag=True, help="Wait for more until Ctrl-C.")
@service_options
def decisions(outcome: str | None, limit: int | None, follow: bool, settings: Settings) -> None:
    """Take decisions off the results queues and print them as JSON Lines.

    A decision is acknowledged, and so removed from its queue, once it is printed. Ends when the queues are
    empty, unless --follow is given. A message that is no decision becomes a dead letter, reason malformed.
    Decisions that go elsewhere, as results.accepted_via and results.rejected_via say, are left to their readers.
    """
    # Ctrl-C ends the command between two decisions: one printed but not acknowledged would be printed again next time.
    stopping = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    taken = 0
    only = cast("Outcome | None", outcome)
    with open_results(make_celery(settings), settings, only) as results:
        for other_way in read_elsewhere(settings, only):
            say(other_way)
        while not stopping.is_set() and taken != limit:
            before = taken
            for item in results.take():
                print_json(item.decision)
                item.acknowledge()
                taken += 1
                if taken == limit or stopping.is_set():
                    break
            if taken == before:
                if not follow:
                    break
                stopping.wait(_POLL_S)
    say(f"took {taken} decisions")
    if results.set_aside:
        say(f"set aside {results.set_aside} messages that are none: see `kp-scorer dead-letter list --reason malformed`")
