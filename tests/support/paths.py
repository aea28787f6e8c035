"""The places of things that are not part of the package."""

import os
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]

REFERENCE_TRACES: Final = Path(os.environ.get("REFERENCE_TRACES") or REPOSITORY.parent / "shared" / "traces")
"""The folder of real traces and of the scores that they must get: ``REFERENCE_TRACES``, or beside the checkout."""

EXPORTS: Final = REFERENCE_TRACES.parent / "exports" / "langfuse"
"""The folder of real runs as Langfuse exports them, and of what a person reads in each: beside the reference traces."""
