"""Parameters of a model, FLOPs of an iteration, and MFU.

Parameters are those that tensor parallelism divides, those that every rank has, and those of experts. FLOPs are those of
`num_floating_point_operations` of Megatron 0.19: every matrix product three times, attention's two products over the
causal half, the output layer over the whole vocabulary; experts that a token is routed to; no windows. For a Mamba layer
both matrices and 7 FLOPs per value of its states, at twice the hidden size.
"""

from functools import lru_cache
from typing import NamedTuple

from bpipe.predict.layer_variants import Experts, LayerKind
from bpipe.predict.model import Model


class LayerParameters(NamedTuple):
    """Parameters of one layer."""

    matrices: int
    """Divided by tensor parallelism."""
    biases: int
    """Divided by tensor parallelism."""
    replicated: int
    """Held by every tensor-parallel rank: norms, routers, down projections, biases of outputs to the hidden size."""
    experts: int
    """Of all routed experts."""


@lru_cache(maxsize=1024)
def layer_parameters(model: Model, kind: LayerKind = LayerKind()) -> LayerParameters:  # noqa: B008  (a frozen value)
    """Return the parameters of a layer of one kind, on any number of devices."""
    if kind.is_mamba and model.hybrid is not None:
        # Megatron's `MambaMixer` after a norm: its matrices have no biases.
        hybrid = model.hybrid
        matrices = model.hidden_size * (hybrid.projected_size + hybrid.inner_size)
        return LayerParameters(matrices, hybrid.small_parameters, model.norm_parameters, 0)
    hidden, gates = model.hidden_size, 2 if model.gated else 1
    matrices, biases, replicated = _attention_parameters(model) if kind.attends else (0, 0, 0)
    replicated += kind.num_parts * model.norm_parameters
    if kind.further:
        # A projection of two, a norm of each, and a final norm.
        matrices, replicated = matrices + 2 * hidden**2, replicated + 3 * model.norm_parameters
    if not kind.has_mlp:
        return LayerParameters(matrices, biases, replicated, 0)
    if kind.experts and model.experts is not None:
        shared, routers, expert = _expert_parameters(model, model.experts)
        return LayerParameters(matrices + shared, biases, replicated + routers, model.experts.num_experts * expert)
    matrices += hidden * (1 + gates) * model.ffn_hidden_size
    return LayerParameters(
        matrices, biases + gates * model.ffn_hidden_size * model.linear_bias, replicated + hidden * model.linear_bias, 0
    )


def _expert_parameters(model: Model, experts: Experts) -> tuple[int, int, int]:
    """Parameters of shared experts' matrices, of gates and routers, and of one routed expert."""
    hidden, gates = model.hidden_size, 2 if model.gated else 1
    expert = (
        hidden * (1 + gates) * experts.ffn_hidden_size + (gates * experts.ffn_hidden_size + hidden) * model.linear_bias
    )
    return hidden * (1 + gates) * experts.shared_size, hidden * (experts.num_experts + experts.shared_gate), expert


def _attention_parameters(model: Model) -> tuple[int, int, int]:
    """Matrices and biases that tensor parallelism divides, and what every rank has."""
    hidden, latent = model.hidden_size, model.latent
    a_norm = 1 if model.rms_norm else 2
    replicated = 2 * model.kv_channels * a_norm * model.qk_norm + hidden * model.linear_bias
    if latent is None:
        sizes = model.query_size + model.key_value_size
        return hidden * (sizes + model.value_size), sizes * (model.linear_bias or model.qkv_bias), replicated
    up = (latent.q_lora_rank or hidden) * model.query_size
    up += latent.kv_lora_rank * model.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
    return up + hidden * model.value_size, 0, replicated + hidden * latent.down_size + model.latent_ranks * a_norm


@lru_cache(maxsize=1024)
def product_parameters(model: Model, kind: LayerKind = LayerKind()) -> int:  # noqa: B008  (a frozen value)
    """Return the parameters by which every token is multiplied, as Megatron counts FLOPs: without routers,
    and with the norms around a projection to a further token.

    It takes a Mamba layer's inside to be twice the hidden size, even if its heads say otherwise.
    """
    if kind.is_mamba and model.hybrid is not None:
        wide = 2 * model.hidden_size
        return model.hidden_size * (3 * wide + 2 * model.hybrid.key_size + model.hybrid.num_heads)
    of_layer = layer_parameters(model, kind)
    count = of_layer.matrices + 3 * model.hidden_size * kind.further
    if model.latent is not None:
        # The norms of what is projected down are among them there.
        count += (
            model.hidden_size * model.latent.down_size + (model.latent.q_lora_rank or 0) + model.latent.kv_lora_rank
        )
    if kind.experts and model.experts is not None:
        count += model.experts.top_k * model.hidden_size * (3 if model.gated else 2) * model.experts.ffn_hidden_size
    return count


def training_flops(model: Model, batch: int, sequence: int, vocabulary: int) -> int:
    """Return the FLOPs of an iteration without recomputation. `vocabulary`: as padded."""
    matrices = (
        sum(number * product_parameters(model, kind) for kind, number in model.kinds())
        + model.num_predictions * model.hidden_size * vocabulary
    )
    attending = sum(number for kind, number in model.kinds() if kind.attends)
    scans = 0
    if model.hybrid is not None:
        mambas = sum(number for kind, number in model.kinds() if kind.is_mamba)
        scans = 3 * 7 * 2 * model.hidden_size * model.hybrid.state_dim * mambas
    return batch * sequence * (6 * (matrices + attending * model.core_size * sequence) + scans)


def mfu(flops: float, seconds: float, num_devices: int, peak_flops_per_s: float) -> float:
    """Return model FLOPs utilization, from 0 to 1."""
    return flops / (seconds * num_devices * peak_flops_per_s)
