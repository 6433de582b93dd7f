# SPDX-License-Identifier: Apache-2.0
"""Host memory that a process can allocate, from the Linux kernel."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return how many bytes of host memory this process can allocate. The limit of its control group is respected."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = read_system_file(cgroup / "memory.max"), read_system_file(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        # The control group counts the page cache as used memory, but the system can reclaim it.
        cached = dict(line.split() for line in read_system_file(cgroup / "memory.stat").splitlines()).get(
            "inactive_file", "0"
        )
        available = min(available, int(limit) - int(used) + int(cached))
    return max(available, 0)


def read_system_file(path: Path) -> str:
    """Return the content of a file of the Linux kernel, or "" if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
