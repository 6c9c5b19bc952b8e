"""Shards of the vocabulary with which a configuration can be trained (docs/vocabulary.md)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from bpipe.build import ScheduleConfig, unchecked
from bpipe.predict.layout import Setup
from bpipe.schedule.check.deadlock import WaitLevel
from bpipe.schedule.check.rules import ScheduleError, check_waits
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.layout import Vocabulary

# Steps of the steady phase within which ranks deadlock if they ever do.
_STEPS = 4
# From this generation on Megatron does not want CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism.
_MANY_QUEUES = ("b200", "gb200")


def with_shards(setup: Setup, algorithms: Sequence[str]) -> Iterator[Setup]:
    """Yield the setup with shards by each algorithm that the trainer has for it: the output layer alone, then the
    embedding, too."""
    family = FAMILIES[setup.schedule]
    if family.sharded is None or setup.pipeline < 2 or setup.slices > 1:
        return
    one_queue = has_one_queue(setup)
    for name in algorithms:
        algorithm = Vocabulary(name)
        if algorithm is Vocabulary.WHOLE or (algorithm is Vocabulary.INTERLACED and not family.interlaces):
            continue
        if algorithm is Vocabulary.TWO and one_queue:
            # Every rank would wait for all others after its S.
            continue
        for inputs in (False,) if one_queue else (False, True):
            yield replace(setup, vocabulary=algorithm, input_shards=inputs)


def has_one_queue(setup: Setup) -> bool:
    """Whether a device's streams share one queue, as Megatron wants with tensor or context parallelism."""
    return (
        setup.kernels == "gpu"
        and max(setup.tensor, setup.context) > 1
        and not setup.cluster.device.name.startswith(_MANY_QUEUES)
    )


def stands_still(setup: Setup) -> bool:
    """Whether ranks would deadlock in one queue, as sends precede their receivers; the trainer checks this at start."""
    if not (has_one_queue(setup) and (setup.is_sharded or setup.num_pipes > 1)):
        return False
    plain = replace(setup, balance=None)
    return _waits(
        plain.program(
            setup.num_microbatches if setup.num_pipes > 1 else min(setup.num_microbatches, _STEPS * setup.stride)
        )
    )


@lru_cache(maxsize=1024)
def _waits(program: ScheduleConfig) -> bool:
    try:
        check_waits(unchecked(program), WaitLevel.ONE_QUEUE, program.passing)
    except ScheduleError:
        return True
    return False
