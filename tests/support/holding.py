"""The resources that a process still holds after its trainings, by kind: 0 of each if it has released everything.

Memory shared between two processes has no name in the file system, so this reads the process's open files and
mappings.
"""

import os
import threading
from pathlib import Path

import torch.distributed as dist

# Names of the shared memory of `peer` on CPUs and of late devices.
SHARED = ("/memfd:bpipe (deleted)", "/memfd:late (deleted)")


def holding() -> dict[str, int]:
    """Count open or mapped shared memory, process groups besides the world, and threads of this project."""
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": sum(name in SHARED for name in files),
        "mappings": sum(line.endswith(SHARED) for line in mappings),
        "groups": max(len(dist.distributed_c10d._world.pg_map) - 1, 0),
        "threads": sum(thread.name.startswith("bpipe") for thread in threading.enumerate()),
    }
