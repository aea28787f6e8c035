"""``python -m tests.support.limited BYTES FILES MODULE ARGUMENT …`` runs a module in limited memory, with few open files.

FILES are two limits, ``512:4096``: the one that it has at first, and the one up to which it may raise that.
"""

import resource
import runpy
import sys

if __name__ == "__main__":
    most_bytes = int(sys.argv[1])
    soft, hard = map(int, sys.argv[2].split(":"))
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    del sys.argv[:3]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
