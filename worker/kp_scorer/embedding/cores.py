"""How many processor cores this process may use."""

import math
import os
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Count the cores that the process may run on, at most as many as its container's share of processor time.

    More threads than that would use up the share at once and then stall until the next period. A part of a core counts as a
    core: with a thread less, that part of the share would never be used.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(cgroup))))


def _quota(cgroup: Path) -> float:
    """The container's share of processor time in cores: cgroup version 2, then version 1; infinity without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / file).read_text("ascii") for file in files).split()
        except (OSError, ValueError):
            continue
        # No limit is "max" in version 2 and -1 in version 1.
        if quota.isdigit() and int(period) > 0:
            return int(quota) / int(period)
    return math.inf
