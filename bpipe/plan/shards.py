"""With which shards of the vocabulary a configuration can be trained (docs/vocabulary.md)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from bpipe.build import ScheduleConfig, unchecked
from bpipe.predict.layout import Setup
from bpipe.schedule.check.deadlock import WaitLevel
from bpipe.schedule.check.rules import ScheduleError, check_waits
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.layout import Vocabulary

# Steps of the steady phase within which ranks that ever wait for each other do.
_STEPS = 4
# From this generation of devices on Megatron does not ask for CUDA_DEVICE_MAX_CONNECTIONS=1 beside either.
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
            # Every rank would wait after its S for all others'.
            continue
        for inputs in (False,) if one_queue else (False, True):
            yield replace(setup, vocabulary=algorithm, input_shards=inputs)


def has_one_queue(setup: Setup) -> bool:
    """Whether a device's streams share one queue, as Megatron wants with tensor or context parallelism: no algorithm 2
    then."""
    return (
        setup.kernels == "gpu"
        and max(setup.tensor, setup.context) > 1
        and not setup.cluster.device.name.startswith(_MANY_QUEUES)
    )


def stands_still(setup: Setup) -> bool:
    """Whether ranks would wait for each other in one queue, by sends ahead of their receivers, as the trainer finds at
    its start."""
    if not (has_one_queue(setup) and (setup.is_sharded or setup.num_pipes > 1)):
        return False
    alone = replace(setup, balance=None)
    return _waits(
        alone.program(
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
