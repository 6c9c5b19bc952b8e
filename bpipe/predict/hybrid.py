"""Hybrid models, each of whose layers is one part alone: Mamba, attention, an MLP or experts.

A symbol of Megatron's pattern is a layer; `|` begins another stage.
"""

from dataclasses import dataclass

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
