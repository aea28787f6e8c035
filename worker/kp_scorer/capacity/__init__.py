"""How much a fleet bears: what a trace costs, what that adds up to, and how long traces wait when they come at random."""
