"""What layers may have in place of GPT's: experts, latent attention, windows, or one part alone in hybrid models.

A pattern of ones and zeros that repeats says which layers: Megatron's --moe-layer-freq and --window-attn-skip-freq. In a
hybrid model's pattern a symbol is a layer: Mamba, attention, an MLP or experts; `|` begins another stage.
"""

import ast
import re
from dataclasses import dataclass
from itertools import cycle, groupby, islice
from typing import NamedTuple

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
NEXT_STAGE = "|"
# Megatron knows more, which are not modelled.
_OTHERS = {
    "G": "gated delta nets (G)",
    "D": "sparse attention (D)",
    "+": "latent attention (+) in a hybrid model",
    "/": "prediction of further tokens (/)",
}
# Values that a Mamba layer's convolution adds up for one, itself included: `MambaMixer` has no flag for it.
CONVOLUTION = 4
# Beyond any model.
MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A hybrid model; all but the pattern describes Mamba-2 layers (Dao & Gu 2024)."""

    pattern: str
    """A symbol per layer."""
    num_heads: int
    """Heads of Mamba layers."""
    state_dim: int = 128
    """A head's state has `state_dim` times `head_dim` values."""
    head_dim: int = 64
    num_groups: int = 8
    """Groups of heads that share what is written to and read from the state."""

    def __post_init__(self) -> None:
        for symbol in self.pattern:
            if symbol in _OTHERS:
                raise ValueError(f"the pattern has {symbol!r}: {_OTHERS[symbol]} is not modelled, only {_known()}")
            if symbol not in (MAMBA, ATTENTION, MLP, EXPERTS):
                raise ValueError(f"the pattern has {symbol!r}, which is not a layer: known layers are {_known()}")
        if not 1 <= len(self.pattern) <= MOST_LAYERS:
            raise ValueError(f"the pattern has {len(self.pattern)} layers, but must have 1 to {MOST_LAYERS}")
        for name in ("num_heads", "state_dim", "head_dim", "num_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of Mamba layers is {getattr(self, name)}, but must be at least 1")
        if MAMBA in self.pattern and self.num_heads % self.num_groups:
            raise ValueError(f"the {self.num_groups} groups of Mamba layers do not divide their {self.num_heads} heads")

    @property
    def inner_size(self) -> int:
        """Size of what goes through the states, and of its gate."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Size of what is written to the states; what is read of them is as large."""
        return self.num_groups * self.state_dim

    @property
    def convolved_size(self) -> int:
        return self.inner_size + 2 * self.key_size

    @property
    def projected_size(self) -> int:
        """Outputs of the first matrix: a gate, what is convolved, and a step for every head."""
        return self.inner_size + self.convolved_size + self.num_heads

    @property
    def small_parameters(self) -> int:
        """Convolution with its bias; of each head a step's bias, a decay and a skip; and a norm."""
        return self.convolved_size * (CONVOLUTION + 1) + 3 * self.num_heads + self.inner_size

    def refused(self, tensor: int, context: int, on_cpu: bool) -> str | None:
        """Return why Mamba layers cannot be cut or predicted so, and the way out; None if they can."""
        if MAMBA not in self.pattern:
            return None
        if on_cpu:
            return "Mamba layers have no CPU kernels: choose kernels gpu"
        if context > 1:
            return (
                f"Mamba layers over several context-parallel ranks are not modelled: give context parallel 1, not "
                f"{context}"
            )
        if self.num_heads % tensor or self.num_groups % tensor:
            return (
                f"tensor parallel {tensor} does not divide {self.num_heads} heads and {self.num_groups} groups of "
                f"Mamba layers"
            )
        return None

    def with_stages(self, layers: tuple[int, ...]) -> str:
        """Return Megatron's text for these layers per stage."""
        left, stages = self.pattern, []
        for number in layers:
            stages.append(left[:number])
            left = left[number:]
        return NEXT_STAGE.join(stages)


def _known() -> str:
    return f"{MAMBA} (Mamba), {ATTENTION} (attention), {MLP} (MLP) and {EXPERTS} (experts)"


def split_text(text: str) -> tuple[str, tuple[int, ...] | None]:
    """Return the symbols of Megatron's text, and the layers of every stage where it says them."""
    stages = text.split(NEXT_STAGE)
    return "".join(stages), tuple(map(len, stages)) if len(stages) > 1 else None


# One for every layer.
EVERY_LAYER = (1,)


class LayerKind(NamedTuple):
    """Kind of a layer, if layers differ."""

    experts: bool = False
    """Whether it has experts."""
    window: int | None = None
    """Tokens that a token attends to at most."""
    symbol: str | None = None
    """Symbol of a hybrid model's layer, which is one part; None: attention with an MLP or experts."""
    further: bool = False
    """Whether it predicts a further token, from a projection of hidden states joined to that token's embedding."""

    @property
    def is_mamba(self) -> bool:
        return self.symbol == MAMBA

    @property
    def attends(self) -> bool:
        return self.symbol in (None, ATTENTION)

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has an MLP, or experts in its place."""
        return self.symbol in (None, MLP, EXPERTS)

    @property
    def num_parts(self) -> int:
        """Each has a norm, a matrix after it and one that returns, and is added to its input."""
        return 2 if self.symbol is None else 1


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts in place of a layer's MLP."""

    num_experts: int
    top_k: int
    """Experts that a token goes to."""
    ffn_hidden_size: int
    """Size of one expert."""
    shared_size: int = 0
    """Size of all experts that every token goes to, together; 0 without."""
    shared_gate: bool = False
    """Whether a sigmoid weights their output."""
    pattern: tuple[int, ...] = EVERY_LAYER
    """Which layers have experts."""
    sigmoid: bool = False
    """Whether scores are sigmoids, with a bias that no gradient trains to balance loads."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "ffn_hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of experts is {getattr(self, name)}, but must be at least 1")
        if self.top_k > self.num_experts:
            raise ValueError(f"each token goes to {self.top_k} experts (top-k), but there are only {self.num_experts}")
        if self.shared_size < 0 or (self.shared_gate and not self.shared_size):
            raise ValueError(
                f"a shared expert of size {self.shared_size}{' with a gate' * self.shared_gate}: give its size"
            )
        object.__setattr__(self, "pattern", shortest(self.pattern))
        if not any(self.pattern):
            raise ValueError("no layer has experts: leave the experts out")


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2")."""

    q_lora_rank: int | None
    """Values per token that queries come from; None: the hidden ones."""
    kv_lora_rank: int
    """Values per token that keys and values come from."""
    qk_head_dim: int
    """Part of a head's query and key that does not rotate."""
    qk_pos_emb_head_dim: int
    """Part that rotates; its key is one for all heads."""
    v_head_dim: int
    """Size of a head's value."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of latent attention is {value}, but must be at least 1")

    @property
    def query_head(self) -> int:
        """Size of a head's query, and of its key."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def down_size(self) -> int:
        """Values that the down projections make of a token; every tensor-parallel rank has all of them."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_pos_emb_head_dim


def shortest(pattern: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shortest pattern that repeats to this one."""
    if not pattern or any(value not in (0, 1) for value in pattern):
        raise ValueError(f"a pattern of layers must be one or more ones and zeros, not {str(pattern)[:40]}")
    for length in range(1, len(pattern)):
        if len(pattern) % length == 0 and pattern[:length] * (len(pattern) // length) == pattern:
            return pattern[:length]
    return pattern


def read_pattern(text: str) -> tuple[int, ...]:
    """Read Megatron's pattern: a number N is one layer with experts, then N - 1 without; a list is `[0]*3+[1]*58`,
    `([0]+[1]*3)*4`."""
    plain = text.replace(" ", "")
    if re.fullmatch("[0-9]{1,5}", plain) and 1 <= int(plain) <= MOST_LAYERS:
        return shortest((1, *(0,) * (int(plain) - 1)))
    try:
        # Nobody means deeper or longer ones.
        is_short = len(plain) <= 4 * MOST_LAYERS and plain.count("(") <= 100
        return shortest(_listed(ast.parse(plain, mode="eval").body) if is_short else ())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text[:60]!r} is not a pattern of layers, such as 2 or [0]*3+[1]*58") from None


def _listed(node: ast.expr) -> tuple[int, ...]:
    """Return the values of a list, of lists joined by +, or of one repeated by *. Nothing is evaluated."""
    match node:
        case ast.List(values):
            pattern = tuple(int(ast.unparse(value)) for value in values)
        case ast.BinOp(left, ast.Add(), right):
            pattern = _listed(left) + _listed(right)
        case ast.BinOp(left, ast.Mult(), ast.Constant(int(times))):
            part = _listed(left)
            pattern = part * min(times, MOST_LAYERS // len(part) + 1)
        case _:
            pattern = ()
    if not 1 <= len(pattern) <= MOST_LAYERS:
        raise ValueError(f"{len(pattern)} layers")
    return pattern


def write_pattern(pattern: tuple[int, ...], num_layers: int) -> str:
    """Write a pattern of layers with experts as Megatron reads it: a number where that says it, else a list."""
    whole = _repeated(pattern, num_layers)
    numbers = (step for step in range(1, num_layers + 1) if whole == _repeated((1, *(0,) * (step - 1)), num_layers))
    return str(next(numbers, write_list(pattern, num_layers)))


def write_list(pattern: tuple[int, ...], num_layers: int) -> str:
    """Return a list for all layers."""
    repeats = len(pattern) < num_layers and num_layers % len(pattern) == 0
    values = pattern if repeats else _repeated(pattern, num_layers)
    runs = "+".join(f"[{value}]*{len(tuple(run))}" for value, run in groupby(values))
    return f"({runs})" + f"*{num_layers // len(pattern)}" * repeats


def _repeated(pattern: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    return tuple(islice(cycle(pattern), num_layers))


DISPATCHERS = ("alltoall", "allgather", "flex")


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing of tokens to experts."""

    expert: int = 1
    """Devices that share a layer's experts."""
    expert_tensor: int | None = None
    """Devices that divide each of them; by default the tensor-parallel size."""
    dispatcher: str = DISPATCHERS[0]
    """Megatron's dispatcher."""
    capacity: float | None = None
    """Most tokens of an expert, as a multiple of its even share."""
    padded: bool = False
    """Whether every expert takes exactly its capacity."""

    def __post_init__(self) -> None:
        if self.dispatcher not in DISPATCHERS:
            raise ValueError(f"unknown dispatcher {self.dispatcher!r}: choose from {', '.join(DISPATCHERS)}")
        for name, value in (("expert parallel", self.expert), ("expert tensor parallel", self.expert_tensor)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
        if self.capacity is not None and self.capacity <= 0:
            raise ValueError(f"the capacity of experts is {self.capacity:g} times their even share: give more than 0")
        if self.padded and self.capacity is None:
            raise ValueError("experts are padded to a capacity: give the capacity factor, too")
