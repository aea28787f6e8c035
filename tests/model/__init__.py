"""A model of the ledger, the logs and the dead letters, which what Redis holds is compared with in any order of scripts."""
