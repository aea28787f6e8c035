"""``python -m kp_scorer.cli``: ``kp-scorer`` with a given interpreter."""

from kp_scorer.cli.main import main

if __name__ == "__main__":
    main()
