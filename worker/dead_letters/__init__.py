"""Submissions that will never be decided, kept with their reason and their bytes."""

from worker.dead_letters.dead_letters import REASONS, DeadLetter, DeadLetters, Reason

__all__ = ["REASONS", "DeadLetter", "DeadLetters", "Reason"]
