"""One module for each command, or for a few that belong together; `cli/main.py` imports it when its command is called."""
