"""Look at what a PyTorch program issues, step by step, and run it next to the program.

`audit(step)` runs a step function a few times and lists, by source line, what a CUDA graph or `torch.compile` would
freeze, lose or break on. `Session` runs a step's operations next to the Python that issues them. A package of its own:
it needs torch, and knows neither bpipe nor Megatron.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    # With this name `python -m terra` says so in one line.
    raise ImportError('terra needs torch, which is not installed: pip install "torch>=2.11"', name="terra")

from terra.audit.compare import Audit, Finding, Kind
from terra.audit.record import Recorder
from terra.audit.run import audit
from terra.run.session import Session

__all__ = ["audit", "Audit", "Finding", "Kind", "Recorder", "Session"]
