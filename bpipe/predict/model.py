"""A transformer by its sizes."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from bpipe.predict.layer_variants import (
    ATTENTION,
    EVERY_LAYER,
    EXPERTS,
    MOST_LAYERS,
    Experts,
    Hybrid,
    Latent,
    LayerKind,
    shortest,
)


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder. The names are Megatron's flags if it has one."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Heads of keys and values."""
    kv_channels: int
    """Channels of a head."""
    ffn_hidden_size: int
    """Size of the MLP in layers without experts."""
    vocabulary: int
    """Tokens of the vocabulary, not padded."""
    sequence: int
    """Tokens of a sequence by default."""
    gated: bool = False
    """SwiGLU: the MLP's first projection is twice as wide."""
    rms_norm: bool = False
    """Norms have a weight and no bias."""
    linear_bias: bool = True
    """All linear layers have biases."""
    learned_positions: bool = True
    """An embedding of the sequence's length; without, positions rotate queries and keys."""
    tied_embedding: bool = True
    dropout: bool = True
    squared_relu: bool = False
    """Activation of an MLP without a gate."""
    qkv_bias: bool = False
    """Only the projections of Q, K and V have biases."""
    qk_norm: bool = False
    """Queries and keys of every head are normed, by one norm each."""
    window: int | None = None
    """Tokens that a token attends to at most, in the layers of `window_pattern`."""
    window_pattern: tuple[int, ...] = EVERY_LAYER
    chunk: int | None = None
    """Tokens within which alone tokens attend; not modelled."""
    experts: Experts | None = None
    """Experts in place of the MLP, in some layers or all."""
    latent: Latent | None = None
    """Latent attention."""
    hybrid: Hybrid | None = None
    """Every layer is one part alone."""
    no_positions: bool = False
    """Nothing encodes positions."""
    mtp_num_layers: int | None = None
    """Further tokens that are predicted, each by a layer like the last one (multi-token prediction)."""
    mtp_use_repeated_layer: bool = False
    """All further tokens are predicted by one layer, in turn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "window_pattern", shortest(self.window_pattern))
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is int and value < 1:
                raise ValueError(f"model {self.name}: {name} is {value}, but must be at least 1")
        for is_broken, text in self._rules():
            if is_broken:
                raise ValueError(f"model {self.name}: {text}")

    def _rules(self) -> Iterator[tuple[object, str]]:
        """Yield whether each rule is broken, and what to say if it is."""
        experts, layers, groups, heads = self.experts, self.num_layers, self.num_query_groups, self.num_attention_heads
        yield layers > MOST_LAYERS, f"num_layers is {layers}, but must be at most {MOST_LAYERS}"
        yield heads % groups, f"{groups} query groups do not divide {heads} heads"
        yield (self.squared_relu and self.gated, "SwiGLU and squared ReLU exclude each other: leave one of the two out")
        yield (
            self.mtp_use_repeated_layer and self.mtp_num_layers is None,
            "a repeated layer predicts further tokens, but there are none: give their number (--mtp-num-layers), or "
            "leave --mtp-use-repeated-layer out",
        )
        yield (
            self.mtp_num_layers and self.learned_positions,
            "Megatron predicts further tokens with rotary positions or none: give --position-embedding-type rope, or "
            "leave --mtp-num-layers out",
        )
        yield (
            self.no_positions and self.learned_positions,
            "learned positions and no positions exclude each other: leave one of the two out",
        )
        for name, pattern in (("experts", experts.pattern if experts else ()), ("windows", self.window_pattern)):
            yield len(pattern) > layers, f"{name} are given for {len(pattern)} layers, but there are {layers}"
        yield (
            self.latent and (groups != heads or self.qk_norm or self.qkv_bias or self.window),
            "latent attention has no query groups, windows, norms of heads or biases: leave one of them out",
        )
        yield (
            self.linear_bias and (self.latent or (experts and experts.shared_size)),
            "with latent attention or shared experts no linear layer has a bias: leave one of them out",
        )
        if self.hybrid is None:
            return
        pattern_text = self.hybrid.pattern
        yield len(pattern_text) != layers, f"the pattern has {len(pattern_text)} layers, not {layers}"
        yield (
            (experts is not None) != (EXPERTS in pattern_text),
            f"layers with experts need {EXPERTS} in the pattern and their sizes: give both or neither (--num-experts)",
        )
        yield (
            self.latent or (experts and experts.pattern != EVERY_LAYER),
            "hybrid layers have no latent attention or separate pattern of experts: leave one of them out",
        )
        yield (
            self.mtp_num_layers is not None,
            f"multi-token prediction is not modelled for hybrid layers: leave --mtp-num-layers {self.mtp_num_layers} "
            "out to predict the run without it",
        )

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike."""
        if self.hybrid is not None:
            return False
        return (self.experts is None or self.experts.pattern == EVERY_LAYER) and (
            self.window is None or self.window_pattern == EVERY_LAYER
        )

    @property
    def period(self) -> int:
        """Number of layers after which the kinds repeat."""
        if self.hybrid is not None:
            return self.num_layers
        return math.lcm(len(self.window_pattern), 1 if self.experts is None else len(self.experts.pattern))

    def kind(self, layer: int) -> LayerKind:
        windowed = self.window if self.window_pattern[layer % len(self.window_pattern)] else None
        if self.hybrid is not None:
            symbol = self.hybrid.pattern[layer]
            return LayerKind(symbol == EXPERTS, windowed if symbol == ATTENTION else None, symbol)
        experts = self.experts is not None and bool(self.experts.pattern[layer % len(self.experts.pattern)])
        return LayerKind(experts, windowed)

    @property
    def further(self) -> tuple[LayerKind, int] | None:
        """The kind of layer that predicts further tokens, and how often it is computed: Megatron takes the last
        layer's, and counts layers from one again for windows. None: no further tokens are predicted."""
        if self.mtp_num_layers is None:
            return None
        window = self.window if self.window_pattern[0] else None
        return self.kind(self.num_layers - 1)._replace(window=window, further=True), self.mtp_num_layers

    @property
    def num_predictions(self) -> int:
        """How many tokens are predicted at each position."""
        return 1 + (self.mtp_num_layers or 0)

    def num_held(self, kind: LayerKind, computed: int) -> int:
        """Return how many layers of a kind have weights of their own, if so many are computed."""
        return 1 if kind.further and self.mtp_use_repeated_layer else computed

    def kinds(self) -> tuple[tuple[LayerKind, int], ...]:
        """Return the number of layers of each kind, those for further tokens included."""
        layers = ((self.kind(0), self.num_layers),) if self.is_uniform else _kinds(self)
        return layers if self.further is None else (*layers, self.further)

    def check_attention(self, is_fused: bool, sequence: int) -> None:
        """Raise ValueError where attention over a sequence is not modelled."""
        if not is_fused and self.window is not None and sequence > self.window:
            raise ValueError(f"{self.name}: windows are modelled with attention flash only")
        if self.chunk is not None and sequence > self.chunk:
            raise ValueError(
                f"{self.name} attends within chunks of {self.chunk} tokens, which is not modelled where the sequence, "
                f"{sequence}, is longer: give --seq {self.chunk} or less"
            )

    def no_context(self, sequence: int, cp_comm_type: str) -> str | None:
        """Return why Transformer Engine lacks this attention over context-parallel ranks, and the way out; or None."""
        if cp_comm_type == "p2p" and self.window is not None and sequence > self.window:
            return (
                f"{self.name} has windows, which a ring of context-parallel ranks cannot compute: give --cp-comm-type "
                f"all_gather or a2a"
            )
        if cp_comm_type != "p2p" and self.latent is not None:
            return (
                f"{self.name} has latent attention, which context-parallel ranks compute only in a ring: give "
                f"--cp-comm-type p2p"
            )
        return None

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * (self.latent.query_head if self.latent else self.kv_channels)

    @property
    def value_size(self) -> int:
        """Size of attention's output: a value for every head."""
        return self.num_attention_heads * (self.latent.v_head_dim if self.latent else self.kv_channels)

    @property
    def key_value_size(self) -> int:
        """Size of keys and values together."""
        return self.query_size + self.value_size if self.latent else 2 * self.num_query_groups * self.kv_channels

    @property
    def latent_ranks(self) -> int:
        """Values of a token that latent attention projects down and norms; 0 for other attention."""
        return 0 if self.latent is None else (self.latent.q_lora_rank or 0) + self.latent.kv_lora_rank

    @property
    def core_size(self) -> int:
        """Multiplications of a query with a key over both products, halved for the causal half of the square."""
        return (self.query_size + self.value_size) // 2

    @property
    def first_mlp_size(self) -> int:
        """Outputs of the MLP's first projection."""
        return self.ffn_hidden_size * (2 if self.gated else 1)

    @property
    def norm_parameters(self) -> int:
        return self.hidden_size * (1 if self.rms_norm else 2)


@lru_cache(maxsize=1024)
def _kinds(model: Model) -> tuple[tuple[LayerKind, int], ...]:
    return tuple(counted(model.kind, 0, model.num_layers, model.period).items())


def counted[Sort: Hashable](sort_of: Callable[[int], Sort], first: int, number: int, period: int) -> dict[Sort, int]:
    """Return how many of each sort the first `number` layers have, which repeat after a period."""
    periods, rest = divmod(number, period)
    counts = Counter(sort_of(first + place) for place in range(min(number, period)))
    beyond = Counter(sort_of(first + place) for place in range(rest if periods else 0))
    return {sort: count * max(periods, 1) + beyond[sort] for sort, count in counts.items()}


def gpt(
    name: str, num_layers: int, hidden_size: int, heads: int, vocabulary: int = 51200, sequence: int = 2048
) -> Model:
    """Return a GPT-3 model: full attention, MLP of 4 times the hidden size, biases, dropout, tied embedding."""
    return Model(
        name, num_layers, hidden_size, heads, heads, hidden_size // heads, 4 * hidden_size, vocabulary, sequence
    )


def llama(
    name: str,
    num_layers: int,
    hidden_size: int,
    heads: int,
    groups: int,
    ffn: int,
    vocabulary: int,
    sequence: int,
    kv_channels: int = 128,
) -> Model:
    """Return a LLaMA model: SwiGLU, RMSNorm, rotary positions, no biases or dropout, untied embedding."""
    sizes = (num_layers, hidden_size, heads, groups, kv_channels, ffn, vocabulary, sequence)
    return Model(name, *sizes, True, True, False, False, False, False)


# GPT-3 13B, 96B, 134B: Kim et al. 2023 (BPipe), table of models; GPT-3 175B: Brown et al. 2020, vocabulary padded as
# Megatron pads it. LLaMA 65B: Touvron et al. 2023; sequence 2048 as trained. LLaMA 3: Grattafiori et al. 2024, table 3;
# sequence 8192. Mixtral: Jiang et al. 2024. DeepSeek-V3: DeepSeek-AI 2024, 4.2. Qwen3: Yang et al. 2025, table 2;
# sequence 4096 as trained first.
PRESETS = {
    model.name: model
    for model in (
        gpt("gpt3-13b", 40, 5120, 40),
        gpt("gpt3-96b", 80, 9984, 104),
        gpt("gpt3-134b", 84, 11520, 120),
        gpt("gpt3-175b", 96, 12288, 96),
        llama("llama-65b", 80, 8192, 64, 64, 22016, 32000, 2048),
        llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256, 8192),
        replace(llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 4096), experts=Experts(8, 2, 14336)),
        replace(
            llama("deepseek-v3", 61, 7168, 128, 128, 18432, 129280, 4096),
            experts=Experts(256, 8, 2048, 2048, pattern=(0,) * 3 + (1,) * 58, sigmoid=True),
            latent=Latent(1536, 512, 128, 64, 128),
        ),
        replace(
            llama("qwen3-30b-a3b", 48, 2048, 32, 4, 6144, 151936, 4096), qk_norm=True, experts=Experts(128, 8, 768)
        ),
        replace(
            llama("qwen3-235b-a22b", 94, 4096, 64, 4, 12288, 151936, 4096), qk_norm=True, experts=Experts(128, 8, 1536)
        ),
    )
}
