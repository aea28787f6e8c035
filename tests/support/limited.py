"""``python -m tests.support.limited BYTES MODULE ARGUMENT …`` runs a module in limited memory, with few open files at first."""

import resource
import runpy
import sys

if __name__ == "__main__":
    most_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    # On most systems a process starts with a limit of 1,024, which it may raise.
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
