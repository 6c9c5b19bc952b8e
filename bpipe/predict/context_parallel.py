"""Seconds and bytes that context parallelism adds to attention.

Of 2c equal parts of a sequence each rank has one from the front and one from the back, so causal loads are even. Its
queries need the keys and values of all others, which arrive in one of three ways, as in Transformer Engine's
`context_parallel`:
  p2p        Keys and values pass round a ring, each during the computation of the part before, in c steps of equal work.
             Backward their gradients follow one step later. Every step's result is kept, and all are summed in 32 bit.
  all_gather All keys and values are gathered before, and their gradients scattered after; both are waited for.
  a2a        Every rank gets the whole sequence for its part of the heads, and returns the result; waited for.
Kernels are taken to reach the same share of the peak on shorter sequences, and not to be slowed by a ring's messages.
"""

from bpipe.predict.expert_parallel import Reach, reach
from bpipe.predict.layout import Setup
from bpipe.predict.sizes import LINK_EFFICIENCY, LINK_LATENCY_S, Rates, element_bytes, num_tokens, shard_size

# What every step gives is read, and added to a sum of 32 bit.
_SUM_BYTES = 4


def with_exchange(setup: Setup, forward_s: float, backward_s: float) -> tuple[float, float]:
    """Return forward and backward seconds of the core with what it waits for and what is copied and added up."""
    c, rates, element = setup.context, Rates.of(setup), element_bytes(setup)
    query, both, output = (element * values for values in _values(setup))
    if setup.cp_comm_type == "p2p":
        hop, step, step_back = _hop_seconds(setup, both), forward_s / c, backward_s / c
        waits = (c - 1) * max(0.0, hop - step)
        # First keys and values alone, last their gradients alone, between both.
        waits_back = 2 * max(0.0, hop - step_back) + (c - 2) * max(0.0, _hop_seconds(setup, 2 * both) - step_back)
        copied, copied_back = c * output * (1 + 2 * _SUM_BYTES / element), 3 * c * (query + both)
    elif setup.cp_comm_type == "all_gather":
        gathered = _gather_seconds(setup, both)
        waits, waits_back = gathered, 2 * gathered
        # Put in the order of the sequence, and taken from it by each of two parts.
        copied, copied_back = 4 * c * both, 8 * c * both
    else:
        waits = waits_back = _to_all_seconds(setup, query + both) + _to_all_seconds(setup, output)
        # Backward the same of the gradients.
        copied = copied_back = 4 * (query + both + output)
    return forward_s + waits + copied / rates.memory, backward_s + waits_back + copied_back / rates.memory


def exchange_bytes(setup: Setup) -> int:
    """Return the bytes of buffers for the exchange: parts and results of a ring, or what is gathered or sent."""
    if setup.context == 1:
        return 0
    element, c = element_bytes(setup), setup.context
    query, both, output = _values(setup)
    if setup.cp_comm_type == "p2p":
        return c * element * (both + output) + _SUM_BYTES * output
    if setup.cp_comm_type == "all_gather":
        return 4 * c * element * both
    return 2 * element * (query + both + output)


def _values(setup: Setup) -> tuple[int, int, int]:
    """Values of a rank's tokens: queries, keys and values together, and attention's output."""
    model, tokens = setup.model, num_tokens(setup)
    query, both, output = (
        shard_size(tokens * size, setup.tensor) for size in (model.query_size, model.key_value_size, model.value_size)
    )
    return query, both, output


def _reach(setup: Setup) -> Reach:
    return reach(setup, setup.context, setup.tensor)


def _hop_seconds(setup: Setup, num_bytes: float) -> float:
    """Seconds to the next rank of the ring, at the pace of its slowest link."""
    device = setup.cluster.device
    link = device.among(2) if _reach(setup).nodes == 1 else device.between_bytes_per_s
    return num_bytes / (link * LINK_EFFICIENCY) + LINK_LATENCY_S


def _gather_seconds(setup: Setup, num_bytes: float) -> float:
    """Data from other nodes passes as many ports as the ring has devices in a node."""
    ring, device = _reach(setup), setup.cluster.device
    inside = num_bytes * (setup.context - 1) / device.among(ring.here)
    between = num_bytes * (setup.context - ring.here) / ring.here / device.between_bytes_per_s
    return max(inside, between) / LINK_EFFICIENCY + LINK_LATENCY_S


def _to_all_seconds(setup: Setup, num_bytes: float) -> float:
    group, device, part = _reach(setup), setup.cluster.device, num_bytes / setup.context
    inside = part * (group.here - 1) / device.among(group.here)
    between = part * (setup.context - group.here) / device.between_bytes_per_s
    return max(inside, between) / LINK_EFFICIENCY + LINK_LATENCY_S
