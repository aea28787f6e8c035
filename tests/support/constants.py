"""``python -m tests.support.constants MODULE ARGUMENT …`` runs a module with other constants of the settings' sections.

``CONSTANTS`` names them and their values: ``LedgerSettings.max_resends=0``, with spaces in between.
"""

import json
import os
import runpy
import sys

from kp_scorer.settings import sections


def set_constants() -> None:
    for each in os.environ.get("CONSTANTS", "").split():
        name, _, value = each.partition("=")
        section, _, constant = name.partition(".")
        assert hasattr(getattr(sections, section), constant)
        setattr(getattr(sections, section), constant, json.loads(value))


if __name__ == "__main__":
    set_constants()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
