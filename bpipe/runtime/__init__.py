"""Run a rank's program on real tensors: capture, host buffers, streams and the engine that drives a transport."""


class RuntimeFault(RuntimeError):
    """The run left its program: a wait is missing, an operation came out of order, or storages changed between
    micro-batches."""


class TransferError(RuntimeError):
    """A transfer failed or did not end in time."""
