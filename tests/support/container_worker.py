"""``kp-scorer worker``, with the model, in the memory that deploy/kubernetes gives its container."""

import resource
import sys
from typing import Final

CONTAINER_BYTES: Final = 1_536 * 2**20

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (CONTAINER_BYTES, CONTAINER_BYTES))
    from kp_scorer.cli.main import main

    sys.argv[1:] = ["worker"]
    main()
