"""The machine of a user: its folders, child processes and embedded Redis."""
