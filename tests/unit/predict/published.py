"""Hybrid models, and such with experts, latent attention and windows, by the sizes that their authors publish.

Knows no test.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.predict.hybrid import Hybrid
from bpipe.predict.layer_variants import Experts, Latent
from bpipe.predict.model import Model, llama

# Jiang et al. 2024, "Mixtral of Experts": 46.7 billion parameters, 12.9 of them for a token.
MIXTRAL_8X7B = replace(llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 4096), experts=Experts(8, 2, 14336))
# DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", 4.2: 671 and 37 billion.
DEEPSEEK_V3 = replace(
    llama("deepseek-v3", 61, 7168, 128, 128, 18432, 129280, 4096),
    experts=Experts(256, 8, 2048, 2048, pattern=(0,) * 3 + (1,) * 58, sigmoid=True),
    latent=Latent(1536, 512, 128, 64, 128),
)
# Yang et al. 2025, "Qwen3 Technical Report": 30.5 and 3.3 billion.
QWEN3_30B = replace(
    llama("qwen3-30b-a3b", 48, 2048, 32, 4, 6144, 151936, 4096), qk_norm=True, experts=Experts(128, 8, 768)
)


def nemotron(
    name: str, pattern: str, sizes: tuple[int, int, int, int], hybrid: Hybrid, experts: Experts | None = None
) -> Model:
    """A hybrid: squared ReLU, RMSNorm, no positions, no biases, 131072 tokens.

    `sizes`: hidden, heads, groups, and an MLP's.
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
