"""Models by their published sizes: hybrid ones, and ones with experts, latent attention or windows."""

from __future__ import annotations

from dataclasses import replace

from bpipe.predict.layer_variants import Experts, Hybrid
from bpipe.predict.model import PRESETS, Model, llama

MIXTRAL_8X7B, DEEPSEEK_V3, QWEN3_30B, QWEN3_235B = (
    PRESETS[name] for name in ("mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "qwen3-235b-a22b")
)


def nemotron(
    name: str, pattern: str, sizes: tuple[int, int, int, int], hybrid: Hybrid, experts: Experts | None = None
) -> Model:
    """A hybrid: squared ReLU, RMSNorm, no positions, no biases, 131072 tokens.

    `sizes`: hidden size, heads, groups, and the MLP's size.
    """
    hidden, heads, groups, ffn = sizes
    return replace(
        llama(name, len(pattern), hidden, heads, groups, ffn, 131072, 8192),
        gated=False,
        squared_relu=True,
        hybrid=hybrid,
        experts=experts,
        no_positions=True,
    )


# NVIDIA 2025, "Nemotron-H", table 1, and the defaults of its configuration class: 8.1 billion parameters.
_NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_H_8B = nemotron("nemotron-h-8b", _NEMOTRON_H, (4096, 32, 8, 21504), Hybrid(_NEMOTRON_H, 128))
# NVIDIA 2025, "NVIDIA Nemotron Nano 2": 8.89 billion, in 17.78 GB of 16 bit.
_NEMOTRON_NANO_2 = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NEMOTRON_NANO_9B = nemotron(
    "nemotron-nano-9b-v2", _NEMOTRON_NANO_2, (4480, 40, 8, 15680), Hybrid(_NEMOTRON_NANO_2, 128, head_dim=80)
)
# NVIDIA 2025, "Nemotron 3 Nano": 31.6 billion, 3.2 of them for a token without its embedding, 3.6 with.
_NEMOTRON_3 = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_EXPERTS = Experts(128, 6, 1856, 3712, sigmoid=True)
NEMOTRON_3_NANO = nemotron("nemotron-3-nano", _NEMOTRON_3, (2688, 32, 2, 1856), Hybrid(_NEMOTRON_3, 64), _EXPERTS)
