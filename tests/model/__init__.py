"""The books in Redis held against a model of them, whatever the order in which the scripts run."""
