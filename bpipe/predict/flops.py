"""FLOPs of an iteration, and MFU.

Two formulas are in use and differ, so every figure names its formula:
  megatron  `num_floating_point_operations` of Megatron 0.19: every matrix product three times, attention's two products over
            the causal half, the output layer over the whole vocabulary; experts that a token is routed to; no windows. For a
            Mamba layer both matrices and 7 FLOPs per value of its states, at twice the hidden size.
  papers    Narayanan et al. 2021 as Kim et al. 2023 and Huang et al. 2024 use it, without recomputation: attention over the
            full square, and the output layer's term as printed, V / (16 L h). Refused for GQA and SwiGLU, where it is wrong.
"""

from bpipe.predict.model import Model
from bpipe.predict.parameters import layer_parameters, product_parameters

FORMULAS = ("megatron", "papers")


def training_flops(
    model: Model, batch: int, sequence: int, formula: str = "megatron", vocabulary: int | None = None
) -> int:
    """Return the FLOPs of an iteration without recomputation. `vocabulary`: default the model's."""
    vocabulary = model.vocabulary if vocabulary is None else vocabulary
    if formula == "megatron":
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
    if formula != "papers":
        raise ValueError(f"unknown formula {formula!r}: choose from {', '.join(FORMULAS)}")
    hidden, layers = model.hidden_size, model.num_layers
    if model.experts or model.latent or model.hybrid or layer_parameters(model).matrices != 12 * hidden**2:
        raise ValueError(f"{model.name} has other layers than those of the papers' formula: use the formula megatron")
    return (
        batch * sequence * (72 * layers * hidden**2 + 12 * layers * hidden * sequence)
        + 9 * batch * sequence * vocabulary * hidden // 2
    )


def mfu(flops: float, seconds: float, num_devices: int, peak_flops_per_s: float) -> float:
    """Return model FLOPs utilization, from 0 to 1."""
    return flops / (seconds * num_devices * peak_flops_per_s)
