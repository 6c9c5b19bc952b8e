"""Look at what an imperative PyTorch program issues, step by step, beside the program itself.

`audit(step)` runs a step function a few times and says, a source line each, what a CUDA graph or `torch.compile` would freeze, lose or
break on. A package of its own: it needs torch, and knows neither bpipe nor Megatron.
"""

from terra.audit.compare import Audit, Finding, Kind
from terra.audit.record import Recorder
from terra.audit.run import audit

__all__ = ["audit", "Audit", "Finding", "Kind", "Recorder"]
