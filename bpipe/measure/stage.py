"""Time one pipeline stage on this machine's device: forward, backward, transfer, output layer. In: a `Case`. Out: a profile's entry.

The stage is built of plain torch modules with the sizes one tensor-parallel rank has. Its collectives are not part of it: one device
measures its own work, and `bpipe simulate` takes what is measured as it is. Knows no schedule and no Megatron.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bpipe.models.model import Model

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Case:
    """What to time. `num_layers` layers of the model, cut over `tensor` devices; the median of `repeats` runs after two that warm up."""

    model: Model
    micro_batch: int
    num_layers: int
    tensor: int
    recompute: str
    attention: str
    precision: str
    device: torch.device
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("micro_batch", "num_layers", "tensor", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name, value in (("heads", self.model.num_attention_heads), ("query groups", self.model.num_query_groups)):
            if value % self.tensor:
                raise ValueError(f"tensor parallel {self.tensor} does not divide {value} {name}")


class Layer(nn.Module):
    """One transformer layer of one tensor-parallel rank; (batch, sequence, hidden) in and out."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        model, t = case.model, case.tensor
        self.heads, self.groups, self.channels = model.num_attention_heads // t, model.num_query_groups // t, model.kv_channels
        self.attention, self.recompute, self.gated = case.attention, case.recompute, model.gated
        self.dropout = 0.1 if model.dropout else 0.0
        device, dtype = case.device, _DTYPES[case.precision]
        norm = nn.RMSNorm if model.rms_norm else nn.LayerNorm
        self.norm_attention, self.norm_mlp = (
            norm(model.hidden_size, device=device, dtype=dtype),
            norm(model.hidden_size, device=device, dtype=dtype),
        )
        queries, bias = self.heads * self.channels, model.linear_bias
        self.qkv = nn.Linear(model.hidden_size, queries + 2 * self.groups * self.channels, bias, device=device, dtype=dtype)
        self.projection = nn.Linear(queries, model.hidden_size, bias, device=device, dtype=dtype)
        self.up = nn.Linear(model.hidden_size, model.first_mlp_size // t, bias, device=device, dtype=dtype)
        self.down = nn.Linear(model.ffn_hidden_size // t, model.hidden_size, bias, device=device, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.recompute == "full":
            return _checkpointed(self._layer, hidden)
        return self._layer(hidden)

    def _layer(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + functional.dropout(self._attend(self.norm_attention(hidden)), self.dropout)
        inside = self.up(self.norm_mlp(hidden))
        if self.gated:
            gate, value = inside.chunk(2, -1)
            inside = functional.silu(gate) * value
        else:
            inside = functional.gelu(inside, approximate="tanh")
        return hidden + functional.dropout(self.down(inside), self.dropout)

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = hidden.shape
        parts = self.qkv(hidden).split([self.heads * self.channels, *[self.groups * self.channels] * 2], -1)
        q, k, v = (part.view(batch, sequence, -1, self.channels).transpose(1, 2) for part in parts)
        if self.attention == "flash":
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=True)
        elif self.recompute == "selective":
            mixed = _checkpointed(self._core, q, k, v)
        else:
            mixed = self._core(q, k, v)
        return self.projection(mixed.transpose(1, 2).reshape(batch, sequence, -1))  # type: ignore[no-any-return]

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / self.channels**0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return functional.dropout(weights, self.dropout) @ v


def _checkpointed(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    output = checkpoint(function, *inputs, use_reentrant=False)
    assert isinstance(output, torch.Tensor)
    return output


def measure(case: Case) -> dict[str, float | int]:
    """An entry for `{"stages": [...]}`. `transfer_s` is left out where this machine has no second device to move to."""
    model = case.model
    stage = nn.Sequential(*(Layer(case) for _ in range(case.num_layers)))
    shape = (case.micro_batch, model.sequence, model.hidden_size)
    hidden = torch.randn(shape, device=case.device, dtype=_DTYPES[case.precision], requires_grad=True)
    gradient = torch.randn_like(hidden)
    forward_s, backward_s = _time(case, lambda: stage(hidden), lambda output: output.backward(gradient))
    saved = saved_bytes(stage, hidden)
    entry: dict[str, float | int] = {"micro_batch": case.micro_batch, "layers": case.num_layers}
    entry |= {"forward_s": forward_s, "backward_s": backward_s, "saved_bytes": saved}
    transfer_s = _transfer_seconds(case, saved)
    if transfer_s is not None:
        entry["transfer_s"] = transfer_s
    entry["output_s"] = sum(_output_seconds(case, hidden))
    return entry


def saved_bytes(stage: nn.Module, hidden: torch.Tensor) -> int:
    """Bytes of the storages that a forward keeps for its backward, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Held on to until the end, so that no storage is freed and its address counted for another.
        kept.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage(hidden)
    return sum(storages.values())


def _output_seconds(case: Case, hidden: torch.Tensor) -> tuple[float, float]:
    """The output layer of this tensor-parallel rank and the loss over its part of the vocabulary."""
    size = -(-case.model.vocabulary // case.tensor)
    output = nn.Linear(case.model.hidden_size, size, bias=False, device=case.device, dtype=hidden.dtype)
    targets = torch.randint(size, (hidden.shape[0] * hidden.shape[1],), device=case.device)
    return _time(
        case,
        lambda: functional.cross_entropy(output(hidden).float().view(-1, size), targets),
        lambda loss: loss.backward(),
    )


def _time(case: Case, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object]) -> tuple[float, float]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(case.repeats + 2):
        times = [_now(case.device)]
        output = forward()
        times.append(_now(case.device))
        backward(output)
        times.append(_now(case.device))
        if repeat >= 2:
            for kind, start, end in zip(seconds, times, times[1:], strict=False):
                kind.append(end - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _now(device: torch.device) -> float:
    """The clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _transfer_seconds(case: Case, num_bytes: int) -> float | None:
    """Copying to a second GPU; between CPU processes a copy in memory is what shared memory does. One GPU alone has nowhere to move to."""
    if case.device.type == "cuda" and torch.cuda.device_count() < 2:
        return None
    other = case.device if case.device.type == "cpu" else torch.device("cuda", (case.device.index or 0) + 1)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=case.device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=other)
    times = []
    for _ in range(case.repeats + 2):
        start = _now(case.device)
        target.copy_(source)
        times.append(_now(case.device) - start)
    return statistics.median(times[2:])
