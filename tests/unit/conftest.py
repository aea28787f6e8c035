"""Hypothesis without deadlines: a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
