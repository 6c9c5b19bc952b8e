"""The worker of the training cases, with gradients of weights added up inside their matrix product, as on every GPU
with Apex or Transformer Engine: the backward writes into `weight.main_grad`, so it must meet the very parameter that
the forward saved.

In and out: as worker.py. The extension that does it needs a GPU; here plain torch stands in for it.
"""

from __future__ import annotations

import sys

from tests.gloo.fused import stand_in

# Before Megatron, which looks for the extension when it is imported.
stand_in()

from megatron.scheduling import cpu as cpu_runtime  # noqa: E402

cpu_runtime.ARGUMENTS = tuple(
    argument for argument in cpu_runtime.ARGUMENTS if argument != "--no-gradient-accumulation-fusion"
)

from tests.gloo import worker  # noqa: E402

if __name__ == "__main__":
    worker.main(*sys.argv[1:])
