"""One setup for every slice of a sequence, and what a stage keeps of a whole micro-batch for them.

A slice's setup has its own tokens only, which attend to all up to its end. Keys, values and their gradients, which a
layer keeps from the first slice's forward to the first slice's backward, are counted apart (`kept_memory`).
"""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from bpipe.predict.layout import Setup
from bpipe.predict.sizes import element_bytes, shard_size
from bpipe.predict.slice_lengths import attention_share, equal_bounds, even_bounds, listed_bounds, work_of
from bpipe.schedule.layout import EVEN
from bpipe.schedule.memory import KeptMemory

# Gradients are added up in no less than 32 bits.
SUM_BYTES = 4


def slice_bounds(setup: Setup) -> tuple[int, ...]:
    """Return where each slice of a sequence begins, and the last ends, as the trainer cuts it.

    Raises ValueError where the sequence has no such slices.
    """
    lengths, sizes = setup.slice_lengths, (setup.sequence, setup.slices, setup.sequence_shards)
    if isinstance(lengths, tuple):
        return listed_bounds(lengths, *sizes)
    if lengths == EVEN:
        return even_bounds(*sizes)
    model = setup.model
    experts = 1 if model.experts is None else model.experts.top_k
    ffn = model.ffn_hidden_size if model.experts is None else model.experts.ffn_hidden_size
    queries, keys = (heads * model.kv_channels for heads in (model.num_attention_heads, model.num_query_groups))
    matrices = 3 if model.gated else 2
    share = attention_share(setup.sequence, model.hidden_size, queries, keys, experts * ffn, matrices)
    return equal_bounds(*sizes, work_of(share))


@lru_cache(maxsize=1024)
def slice_setups(setup: Setup) -> tuple[Setup, ...]:
    """Return a setup of each slice's tokens; the setup itself where sequences are whole.

    Raises ValueError as `slice_bounds` does.
    """
    if setup.slices == 1:
        return (setup,)
    return tuple(replace(setup, span=span) for span in pairwise(slice_bounds(setup)))


def kept_memory(setup: Setup) -> tuple[KeptMemory, ...]:
    """Return what every stage keeps of a micro-batch; nothing where sequences are whole."""
    if setup.slices == 1:
        return ()
    values = setup.sequence * setup.micro_batch * setup.model.key_value_size
    keys = shard_size(element_bytes(setup) * values, setup.tensor)
    gradients = shard_size(max(SUM_BYTES, element_bytes(setup)) * values, setup.tensor)
    attending = (sum(number for kind, _, number in layers if kind.attends) for layers in setup.stage_layers)
    return tuple(KeptMemory(number * keys, number * gradients) for number in attending)
