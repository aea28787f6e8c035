"""Checks, by which operators have traces searched for things beside the score. The process of the checks imports only this."""
