"""Memory-balanced pipeline parallelism: schedules as data, and a runtime that runs exactly what they say.

Importing this package imports neither torch nor Megatron; `bpipe.runtime` and `bpipe.transport` need torch.
"""

__version__ = "0.3.0"
