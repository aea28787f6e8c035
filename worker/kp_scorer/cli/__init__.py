"""The command line: ``kp-scorer``."""
