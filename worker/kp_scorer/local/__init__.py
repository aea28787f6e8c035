"""Manages processes on the user's machine: child processes in general, and the embedded Redis."""
