"""``python -m kp_scorer.cli``: the same as ``kp-scorer``, for starting it with a given interpreter."""

from kp_scorer.cli import main

main()
