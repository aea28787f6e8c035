"""Paths of the repository, and of data that is not part of it."""

import os
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]

REFERENCE_TRACES: Final = Path(os.environ.get("REFERENCE_TRACES") or REPOSITORY.parent / "shared" / "traces")
"""The folder of real traces and of the scores that they must get. By default it is beside the checkout."""

EXPORTS: Final = REFERENCE_TRACES.parent / "exports" / "langfuse"
"""The folder of real runs exported by Langfuse, each with what a person reads in it. It is beside the reference traces."""
