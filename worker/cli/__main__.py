"""``python -m worker.cli``: the same as ``kp-scorer``, for starting it with a given interpreter."""

from worker.cli import main

main()
