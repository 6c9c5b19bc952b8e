"""One rank of a test's training runs whose memory is looked at.

In: as worker.py. Out: the same records; in place of the weights' hash what this process held when its second iteration
began, weights and optimizer state included, and the most that it held in that iteration, in bytes.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
from pathlib import Path
from typing import Any

from tests.gloo import worker

# isort: split
import torch


def kernel_says(name: str) -> int:
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


class PeakRecorder(worker.Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[dict[str, int]] = []

    def _observe(self, train_step: Any) -> Any:
        observed = super()._observe(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            # The peak starts over.
            Path("/proc/self/clear_refs").write_text("5")
            before = kernel_says("VmRSS")
            result = observed(*args, **kwargs)
            self.held.append({"held": before, "peak": kernel_says("VmHWM")})
            return result

        return step

    def weights(self) -> Any:
        return self.held[1]


torch.set_num_threads(1)
cases, folder = sys.argv[1:]
for case in worker.cases_of(cases):
    worker.run(case, Path(folder), PeakRecorder)
