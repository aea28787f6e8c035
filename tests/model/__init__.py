"""A model of the ledger, the logs and the dead letters.

In whatever order the scripts run, Redis must hold what the model holds.
"""
