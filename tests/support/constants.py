"""``python -m tests.support.constants MODULE ARGUMENT …`` runs a module with changed constants of settings or of modules.

The variable ``CONSTANTS`` has their names and values, separated by spaces: ``LedgerSettings.max_resends=0
client.waiting.LEAST_S=2``.
"""

import json
import os
import runpy
import sys
from importlib import import_module

from kp_scorer.settings import sections, server_sections


def set_constants() -> None:
    for each in os.environ.get("CONSTANTS", "").split():
        name, _, value = each.partition("=")
        owner, _, constant = name.rpartition(".")
        homes = (getattr(module, owner, None) for module in (sections, server_sections))
        home = next(filter(None, homes), None) or import_module(f"kp_scorer.{owner}")
        assert hasattr(home, constant)
        setattr(home, constant, json.loads(value))


if __name__ == "__main__":
    set_constants()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
