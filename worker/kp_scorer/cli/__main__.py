"""Where ``kp-scorer`` starts, and ``python -m kp_scorer.cli``, which is the same with a given interpreter."""

import sys

from kp_scorer.cli.health import health
from kp_scorer.cli.streams import guard_streams


def main() -> None:
    """Run the command line and exit."""
    guard_streams()
    if sys.argv[1:2] == ["health"]:
        # By itself, as it is run every few seconds: with all other commands it would take ten times as long.
        health(sys.argv[2:], prog_name="kp-scorer health")
    try:
        # Not above: it takes a second, in which Ctrl-C is to end the command as it does later.
        from kp_scorer.cli.main import run
    except KeyboardInterrupt:
        sys.exit("Aborted!")
    run()


if __name__ == "__main__":
    main()
