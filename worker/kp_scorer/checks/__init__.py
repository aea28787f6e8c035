"""Checks, by which operators have traces searched for things that the score does not show, such as secrets."""
