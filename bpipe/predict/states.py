"""Parameters of stages and ranks, and bytes of their weights and optimizer state, on one device."""

from collections.abc import Mapping
from fractions import Fraction

from bpipe.predict.flops import layer_parameters
from bpipe.predict.layer_variants import LayerKind
from bpipe.predict.layout import Setup
from bpipe.predict.sizes import shard_size
from bpipe.predict.training import TYPE_BYTES, WHOLE, traced_sizes

# Bytes a parameter: weight, gradient, optimizer state (main weights and two moments), and what exists only while
# weights are updated: a copy of 16-bit gradients in 32 bit. They add up to Megatron's 18, 20 and 16 (its guide to the
# distributed optimizer), which divides the last two by the data-parallel size.
PARAMETER_BYTES = {"bf16": (2, 4, 12, 0), "fp16": (2, 2, 12, 4), "fp32": (4, 4, 8, 0)}


def parameter_bytes(setup: Setup) -> tuple[int, int, int, int]:
    """Return a row of `PARAMETER_BYTES`, as flags on gradients and on the optimizer's state change it."""
    if setup.precision == "fp32":
        return PARAMETER_BYTES["fp32"]
    types, switches = setup.state_types, setup.switches
    has_short_gradients = (
        not switches.accumulate_allreduce_grads_in_fp32
        if setup.precision == "fp16"
        else switches.grad_reduce_in_bf16 or types.main_grads_dtype != WHOLE
    )
    weight, gradient, _, copy = PARAMETER_BYTES["fp16" if has_short_gradients else "bf16"]
    state = sum(types.state_bytes(setup.precision, setup.fp8))
    if types.optimizer_cpu_offload and has_short_gradients:
        # A copy of 16-bit gradients in 32 bit is kept from one update to the next.
        state += TYPE_BYTES[WHOLE]
    return weight, gradient, state, min(copy, types.gradient_copy_bytes(setup.fp8))


def stage_parameters(setup: Setup) -> tuple[int, ...]:
    """Return the parameters of every stage on one device, as traced or by formula."""
    traced = traced_sizes(setup)
    if traced is not None:
        return traced.parameters
    model, t = setup.model, setup.tensor
    embedding = shard_size(setup.padded_vocabulary * model.hidden_size, t)
    layers = {kind: layer_parameters(model, kind) for kind, _ in model.kinds()}
    of_kind = {
        kind: shard_size(layer.matrices + layer.biases, t) + layer.replicated + _of_experts(setup, kind)
        for kind, layer in layers.items()
    }
    counts = _by_stage(setup, of_kind)
    counts[0] += setup.sequence * model.hidden_size * model.learned_positions
    counts[setup.norm_stage] += model.norm_parameters
    if not setup.input_shards:
        counts[0] += embedding
    if setup.further_stage:
        # Further tokens are looked up in a copy of the embedding.
        counts[setup.further_stage] += embedding
    # A tied output layer in another stage's chunk than the embedding is a copy of it.
    if not setup.is_sharded and (not model.tied_embedding or setup.pipeline > 1):
        counts[-1] += embedding
    return tuple(counts)


def _by_stage(setup: Setup, of_kind: Mapping[LayerKind, int]) -> list[int]:
    """Return the sums over each stage's layers."""
    num_held = setup.model.num_held
    return [sum(num_held(kind, number) * of_kind[kind] for kind, _, number in layers) for layers in setup.stage_layers]


def _of_experts(setup: Setup, kind: LayerKind) -> int:
    return shard_size(layer_parameters(setup.model, kind).experts, setup.routing.expert * setup.expert_tensor)


def stage_experts(setup: Setup) -> tuple[int, ...]:
    """Return how many parameters of every stage on one device are experts'."""
    if setup.model.experts is None:
        return (0,) * setup.num_stages
    return tuple(_by_stage(setup, {kind: _of_experts(setup, kind) for kind, _ in setup.model.kinds()}))


def shard_parameters(setup: Setup) -> int:
    """Return the parameters of the shards of the vocabulary's layers on one device of any rank."""
    if not setup.is_sharded:
        return 0
    # A tied shard serves both layers; next to a whole embedding it is a copy of some of its rows.
    num_shards = 1 if setup.model.tied_embedding or not setup.input_shards else 2
    return num_shards * shard_size(
        shard_size(setup.padded_vocabulary * setup.model.hidden_size, setup.tensor), setup.pipeline
    )


def stage_matrices(setup: Setup) -> tuple[int, ...]:
    """Return the parameters of every stage on one device that FP8 multiplies; none without FP8."""
    if setup.fp8 is None:
        return (0,) * setup.num_stages
    model = setup.model
    down = 0 if model.latent is None else model.hidden_size * model.latent.down_size
    of_kind = {
        kind: shard_size(layer_parameters(model, kind).matrices, setup.tensor) + down + _of_experts(setup, kind)
        for kind, _ in model.kinds()
    }
    return tuple(_by_stage(setup, of_kind))


def weight_bytes(setup: Setup) -> tuple[int, ...]:
    """Return the weights one device of every rank holds. In FP8 those of matrices are there in 8 bit, too, or alone."""
    weight, *_ = parameter_bytes(setup)
    counts = rank_parameters(setup)
    if setup.fp8 is None:
        return tuple(weight * count for count in counts)
    matrices = stage_matrices(setup)
    extra = setup.fp8.copies(setup.cluster.device.fp8_blocks) * setup.fp8.value_bytes - weight * setup.fp8.param_gather
    low = (sum(matrices[stage] for stage in setup.stages_of(rank)) for rank in range(setup.pipeline))
    return tuple(weight * count + int(extra * part) for count, part in zip(counts, low, strict=True))


def rank_parameters(setup: Setup) -> tuple[int, ...]:
    """Return the parameters one device of every rank holds: with two pipes those of both."""
    counts, shards = stage_parameters(setup), shard_parameters(setup)
    return tuple(sum(counts[stage] for stage in setup.stages_of(rank)) + shards for rank in range(setup.pipeline))


def rank_experts(setup: Setup) -> tuple[int, ...]:
    """Return how many parameters of every rank on one device are experts'."""
    experts = stage_experts(setup)
    return tuple(sum(experts[stage] for stage in setup.stages_of(rank)) for rank in range(setup.pipeline))


def over_replicas(setup: Setup, size: int, count: int, experts: int) -> int:
    """Return so many bytes of every parameter; where the optimizer is distributed replicas have a part each, and of
    experts there are fewer. What the CPU updates has no bytes on a device."""
    if not setup.distributed_optimizer:
        return size * count
    on_device = size * (1 - setup.state_types.on_cpu) if setup.state_types.on_cpu else size
    return _over_replicas(setup, on_device, count, experts)


def cpu_optimizer_bytes(setup: Setup) -> tuple[int, ...]:
    """Return the bytes of its node's memory that the optimizer of one device of every rank takes: main weights, both
    moments and a copy of gradients, all in 32 bits."""
    size = 4 * TYPE_BYTES[WHOLE] * setup.state_types.on_cpu
    counts = zip(rank_parameters(setup), rank_experts(setup), strict=True)
    return tuple(_over_replicas(setup, size, count, experts) for count, experts in counts)


def _over_replicas(setup: Setup, size: int | Fraction, count: int, experts: int) -> int:
    return shard_size(size * (count - experts), setup.replicas) + shard_size(size * experts, setup.expert_replicas)
