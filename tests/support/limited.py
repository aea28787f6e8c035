"""``python -m tests.support.limited BYTES MODULE ARGUMENT …`` runs a module in so much memory."""

import resource
import runpy
import sys

if __name__ == "__main__":
    most_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
