"""One rank of a test's training runs whose tensors are compared, and not only hashes of them.

In: as worker.py. Out: the same records, and beside each `<case>.rank<r>.pt`: this rank's weights before the first
iteration, the gradients that it left, and the weights at the end, by name.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from tests.gloo import worker

# isort: split
import torch


class TensorsRecorder(worker.Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, torch.Tensor]] = {}

    def _observe(self, train_step: Any) -> Any:
        observed = super()._observe(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            first = not self.found
            if first:
                self.found["start"] = self._tensors(lambda weight: weight)
            result = observed(*args, **kwargs)
            if first:
                self.found["gradients"] = self._tensors(lambda weight: weight.main_grad)
            return result

        return step

    def _tensors(self, of: Any) -> dict[str, torch.Tensor]:
        named = (each for chunk in self.model for each in chunk.named_parameters())
        return {name.replace("module.", ""): of(weight).detach().clone() for name, weight in named}

    def weights(self) -> Any:
        self.found["end"] = self._tensors(lambda weight: weight)
        torch.save(self.found, Path(folder) / f"{case['name']}.rank{torch.distributed.get_rank()}.pt")
        return super().weights()


torch.set_num_threads(1)
cases, folder = sys.argv[1:]
for case in worker.cases_of(cases):
    worker.run(case, Path(folder), TensorsRecorder)
