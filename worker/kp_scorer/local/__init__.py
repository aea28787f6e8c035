"""The machine of a user: its child processes and embedded Redis."""
