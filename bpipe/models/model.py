"""Describe a transformer by its sizes. In: numbers. Out: a frozen `Model`. Knows no parallelism, no device, no weights and no file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with `num_layers` equal layers. The names are Megatron's flags where it has one.

    `num_query_groups` key and value heads serve `num_attention_heads` heads of `kv_channels` each. `gated` is a SwiGLU MLP: the first
    projection is twice as wide; `gated_gelu`: its gate is a GELU. `squared_relu` is an MLP's without a gate. `rms_norm` has a weight and no
    bias. `learned_positions` adds an embedding of the sequence's length. `qkv_bias`: of linear layers only those of Q, K and V have biases.
    `qk_norm`: every head's queries and keys are normed, by one norm each. `window`: no token attends to more than so many.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocabulary: int
    sequence: int
    gated: bool = False
    rms_norm: bool = False
    linear_bias: bool = True
    learned_positions: bool = True
    tied_embedding: bool = True
    dropout: bool = True
    squared_relu: bool = False
    gated_gelu: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is int and value < 1:
                raise ValueError(f"model {self.name}: {name} is {value}, but must be at least 1")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(f"model {self.name}: {self.num_query_groups} query groups do not divide {self.num_attention_heads} heads")
        if self.squared_relu and self.gated:
            raise ValueError(f"model {self.name}: a SwiGLU is no squared ReLU: leave one of the two out")

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_size(self) -> int:
        """Keys and values together."""
        return 2 * self.num_query_groups * self.kv_channels

    @property
    def first_mlp_size(self) -> int:
        """Outputs of the MLP's first projection."""
        return self.ffn_hidden_size * (2 if self.gated else 1)

    @property
    def sharded_layer_parameters(self) -> int:
        """Parameters of a layer that tensor parallelism divides: the matrices."""
        attention = self.hidden_size * (2 * self.query_size + self.key_value_size)
        return attention + self.hidden_size * (self.first_mlp_size + self.ffn_hidden_size)

    @property
    def sharded_layer_biases(self) -> int:
        attention = (self.query_size + self.key_value_size) * (self.linear_bias or self.qkv_bias)
        return attention + self.first_mlp_size * self.linear_bias

    @property
    def replicated_layer_parameters(self) -> int:
        """Parameters of a layer that every tensor-parallel rank has: norms, and the biases of what returns to the hidden size."""
        of_heads = 2 * self.kv_channels * (1 if self.rms_norm else 2) * self.qk_norm
        return 2 * self.norm_parameters + of_heads + 2 * self.hidden_size * self.linear_bias

    @property
    def norm_parameters(self) -> int:
        return self.hidden_size * (1 if self.rms_norm else 2)

    @property
    def num_parameters(self) -> int:
        layer = self.sharded_layer_parameters + self.sharded_layer_biases + self.replicated_layer_parameters
        embedding = self.vocabulary * self.hidden_size * (1 if self.tied_embedding else 2)
        positions = self.sequence * self.hidden_size * self.learned_positions
        return self.num_layers * layer + self.norm_parameters + embedding + positions


def gpt(name: str, num_layers: int, hidden_size: int, heads: int, vocabulary: int = 51200, sequence: int = 2048) -> Model:
    """A model as in the GPT-3 papers: full attention, MLP of four times the hidden size, biases, dropout, tied embedding."""
    return Model(name, num_layers, hidden_size, heads, heads, hidden_size // heads, 4 * hidden_size, vocabulary, sequence)


def llama(
    name: str, num_layers: int, hidden_size: int, heads: int, groups: int, ffn: int, vocabulary: int, sequence: int, kv_channels: int = 128
) -> Model:
    """A model as in the LLaMA papers: SwiGLU, RMSNorm, rotary positions, no biases, no dropout, untied embedding."""
    sizes = (num_layers, hidden_size, heads, groups, kv_channels, ffn, vocabulary, sequence)
    return Model(name, *sizes, True, True, False, False, False, False)


# GPT-3 13B, 96B, 134B: Kim et al. 2023 (BPipe), table of models; GPT-3 175B: Brown et al. 2020, vocabulary padded as Megatron pads it.
# LLaMA 65B: Touvron et al. 2023; sequence 2048 as trained. LLaMA 3: Grattafiori et al. 2024, table 3; sequence 8192.
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
    )
}
