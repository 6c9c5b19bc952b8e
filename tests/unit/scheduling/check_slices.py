"""Megatron's GPT, whole and in slices: losses and gradients are equal up to rounding (16 bits: tests/gloo)."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch._C._distributed_c10d import HashStore

from bpipe.config.flags.values import slice_lengths
from bpipe.predict.slices import even_bounds
from bpipe.runtime import RuntimeFault
from bpipe.schedule.layout import EVEN, WORK
from bpipe.schedule.memory import KeptMemory
from megatron.scheduling.hooks import patches
from megatron.scheduling.slices import attention, cuts, stages
from megatron.scheduling.slices.stages import Slicing, attention_share, bounds_of

LENGTH, ROWS, VOCABULARY = 96, 2, 128
# The tolerances of the loss, and of any parameter's gradient relative to its largest value.
NEAR = {torch.float64: (1e-12, 1e-12), torch.float32: (2e-6, 2e-6)}

Row = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Settings of a model besides the usual ones: of its configuration, and `model` of the GPT itself."""

    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)
    documents: bool = False
    # Megatron's routers compute in 32 bits, whatever the model does.
    routed: bool = False

    @property
    def latent(self) -> bool:
        return "kv_lora_rank" in self.config

    @property
    def further(self) -> int:
        return int(self.config.get("mtp_num_layers", 0))


class _Latent(DotProductAttention):
    """Megatron's own core attention, for latent attention, which passes the widths of keys and values that the parent
    class does not accept. It divides its output by `kv_channels`, here the width of a value."""

    def __init__(self, *, k_channels: int | None = None, v_channels: int | None = None, **others: Any) -> None:
        super().__init__(**others)
        assert v_channels in (None, self.config.kv_channels)


def _selective(*modules: str) -> Case:
    return Case({"recompute_granularity": "selective", "recompute_modules": list(modules)})


YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 24,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
GPT = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
    "num_query_groups": 8,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {
    "learned positions, every head its keys, biases": Case(GPT, {"position_embedding_type": "learned_absolute"}),
    "rotary positions, groups of heads, gated": Case(),
    "rotary positions, interleaved, half of the channels": Case({"rotary_interleaved": True}, {"rotary_percent": 0.5}),
    "YaRN": Case({}, {"position_embedding_type": "yarn"}, YARN),
    "no positions": Case({}, {"position_embedding_type": "none"}),
    "norms of queries and keys": Case({"qk_layernorm": True}),
    "a window in every layer": Case({"window_size": (15, 0)}),
    "a window in every second layer": Case({"window_size": (15, 0), "window_attn_skip_freq": 2}),
    "sinks": Case({"softmax_type": "learnable"}),
    "documents, by a mask of the data": Case(documents=True),
    "attention computed again": _selective("core_attn"),
    "the MLP computed again": _selective("mlp"),
    "norms computed again": _selective("layernorm"),
    "all computed again": Case(FULL),
    "two layers computed again": Case(
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    ),
}
LATENT = {
    "num_query_groups": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "kv_channels": 8,
    "rope_type": "rope",
}
CASES |= {
    "latent attention": Case(LATENT),
    "latent attention, YaRN": Case({**LATENT, "rope_type": "yarn"}),
    "latent attention, queries as they are": Case({**LATENT, "q_lora_rank": None}),
    "latent attention, projections computed again": Case(LATENT | _selective("mla_up_proj").config),
    "latent attention, projections and attention computed again": Case(
        LATENT | _selective("mla_up_proj", "core_attn").config
    ),
    "latent attention, all computed again": Case(LATENT | FULL),
    "a further token": Case({"mtp_num_layers": 1}),
    "two further tokens": Case({"mtp_num_layers": 2}),
    "two further tokens, by token": Case({"mtp_num_layers": 2, "calculate_per_token_loss": True}),
    "two further tokens, all computed again": Case({"mtp_num_layers": 2, **FULL}),
    "two further tokens, documents": Case({"mtp_num_layers": 2}, documents=True),
    "two further tokens, latent attention": Case({"mtp_num_layers": 2, **LATENT}),
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}
CASES |= {
    name: Case(EXPERTS | more, routed=True)
    for name, more in {
        "experts": {},
        "experts, even by a bias": {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 1e-3,
        },
        "experts, z loss": {"moe_z_loss_coeff": 1e-2},
        "experts, balancing loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-1},
        "experts, balancing loss by sequence": {
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-1,
        },
        "experts, both balancing losses": {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [1e-1, 1e-2],
        },
        "experts, a balancing loss, two further tokens": {
            "mtp_num_layers": 2,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-1,
            "moe_z_loss_coeff": 1e-2,
        },
    }.items()
}
USUAL = CASES["rotary positions, groups of heads, gated"]
WAYS = {
    "2": even_bounds(LENGTH, 2),
    "4": even_bounds(LENGTH, 4),
    "uneven": (0, 48, 72, 96),
    "short": even_bounds(LENGTH - 1, 4),
}

# For every case; the tolerance is tightest in 64 bits.
FEW_WAYS = {torch.float64: ("uneven", "short"), torch.float32: ("4",)}


def model_of(case: Case, dtype: torch.dtype) -> GPTModel:
    """Three layers; the same weights for the same case."""
    settings = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": False,
        **case.config,
    }
    config = (MLATransformerConfig if case.latent else TransformerConfig)(**settings)
    for name, value in case.later.items():
        setattr(config, name, value)
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        multi_latent_attention=case.latent,
    )
    if case.latent:
        attends = layer.submodules.self_attention
        attends.submodules = dataclasses.replace(attends.submodules, core_attention=_Latent)
    about = {"position_embedding_type": "rope", "rotary_base": 10000, **case.model}
    if case.further:
        about["mtp_block_spec"] = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    model = GPTModel(config, layer, VOCABULARY, LENGTH, share_embeddings_and_output_weights=False, **about)
    # Megatron's own loss computes in 32 bits.
    model.compute_language_model_loss = _cross_entropy
    return model.to(dtype).train()


def _cross_entropy(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Losses by token (batch, sequence) of logits (sequence, batch, vocabulary), in 64 bits if they are, or in 32."""
    logits = logits.transpose(0, 1)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def rows_of(length: int, documents: bool) -> list[Row]:
    """Two micro-batches; a tenth of their tokens has no loss."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(2):
        text = torch.randint(VOCABULARY, (ROWS, length + 1), generator=generator)
        row = {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": (torch.rand(ROWS, length, generator=generator) > 0.1).float(),
            "position_ids": torch.arange(length).expand(ROWS, -1).contiguous(),
        }
        if documents:
            ends = torch.tensor([0] * 20 + [1] * 41 + [2] * (length - 61))
            same = ends[:, None] == ends[None, :]
            row["attention_mask"] = ~(same & torch.ones(length, length, dtype=torch.bool).tril())[None, None]
        rows.append(row)
    return rows


def losses_of(model: GPTModel, row: Row) -> torch.Tensor:
    """The loss of every token."""
    losses: torch.Tensor = model(
        row["tokens"],
        row["position_ids"],
        row.get("attention_mask"),
        labels=row["labels"],
        loss_mask=row["loss_mask"],
    )
    return losses


def part_of(losses: torch.Tensor, row: Row) -> torch.Tensor:
    """What a script returns: the mean loss of the micro-batch's tokens, divided by two for two micro-batches."""
    mask = row["loss_mask"].to(losses.dtype)
    return (losses * mask).sum() / mask.sum() / 2


def whole(model: GPTModel, rows: Sequence[Row]) -> float:
    total = 0.0
    for row in rows:
        loss = part_of(losses_of(model, row), row)
        loss.backward()
        total += loss.item()
    return total


def in_slices(
    model: GPTModel,
    rows: Sequence[Row],
    slicing: Slicing,
) -> float:
    """Run all forwards of a micro-batch, then its backwards in reverse, with two micro-batches in flight."""
    cutting_of, total = slicing.cutting, 0.0
    number = cutting_of.slices
    reversed_order = tuple(reversed(range(number)))
    waiting: list[tuple[int, dict[int, torch.Tensor]]] = []
    for microbatch, row in enumerate(rows):
        losses = {}
        for index in range(number):
            with cutting_of.at(microbatch * number + index):
                cut = {name: cutting_of.cut(value) for name, value in row.items()}
                losses[index] = part_of(cutting_of.pad(losses_of(model, cut)), row)
            total += losses[index].item()
        waiting.append((microbatch, losses))
        if len(waiting) > 1:
            _backwards(slicing, *waiting.pop(0), reversed_order)
    _backwards(slicing, *waiting.pop(0), reversed_order)
    assert slicing.kept.nbytes == 0, "keys are kept of a micro-batch that is over"
    return total


def _backwards(slicing: Slicing, microbatch: int, losses: dict[int, torch.Tensor], order: Sequence[int]) -> None:
    number = slicing.cutting.slices
    for index in order:
        with slicing.cutting.at(microbatch * number + index):
            losses[index].backward()
    slicing.free(0, microbatch)


def gradients(model: GPTModel) -> Gradients:
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return grads


@contextmanager
def sliced(bounds: Sequence[int]) -> Iterator[Slicing]:
    """Inside, Megatron's functions are wrapped."""
    slicing = Slicing(len(bounds) - 1)
    slicing.cutting.bounds = tuple(bounds)
    installed = patches.install(slicing.wraps())
    try:
        yield slicing
    finally:
        installed.remove()


def apart(actual: Gradients, expected: Gradients) -> float:
    """The largest relative difference of all parameters."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-30))
        for name, gradient in expected.items()
    )


def forget_logged_losses() -> None:
    """Megatron keeps one list of routers' losses for the whole process, and one of further tokens'."""
    MTPLossLoggingHelper.tracker.clear()
    get_moe_metrics_tracker()._metrics.clear()


def differences(case: Case, dtype: torch.dtype, names: Iterable[str]) -> Iterator[tuple[str, float, float]]:
    """For each way to cut, the relative difference of the loss, and the largest of any parameter's gradient."""
    model = model_of(case, dtype)
    for length, ways in itertools.groupby(names, lambda way: WAYS[way][-1]):
        rows = rows_of(length, case.documents)
        forget_logged_losses()
        reference = whole(model, rows)
        expected = gradients(model)
        assert len(expected) == len(list(model.parameters())), "a parameter without gradient would be equal to anything"
        for way in ways:
            forget_logged_losses()
            with sliced(WAYS[way]) as slicing:
                loss = in_slices(model, rows, slicing)
            yield way, abs(loss - reference) / abs(reference), apart(gradients(model), expected)


def check_slices_make_the_whole() -> None:
    for (name, case), dtype in itertools.product(CASES.items(), NEAR):
        loss_near, gradients_near = NEAR[torch.float32 if case.routed else dtype]
        for way, loss, worst in differences(case, dtype, FEW_WAYS[dtype]):
            assert loss <= loss_near, f"{name}, {dtype}, {way}: the loss is {loss:.1e} off"
            assert worst <= gradients_near, f"{name}, {dtype}, {way}: a gradient is {worst:.1e} off"


def check_logged_losses_of_experts_add_up() -> None:
    """What Megatron logs about routers, by layer, over two micro-batches."""
    case = Case({**CASES["experts, both balancing losses"].config, "moe_z_loss_coeff": 1e-2})
    model, rows = model_of(case, torch.float64), rows_of(LENGTH, False)
    forget_logged_losses()
    tracker = get_moe_metrics_tracker()
    whole(model, rows)
    expected = {name: entry.values.clone() for name, entry in tracker._metrics.items()}
    assert set(expected) == {"load_balancing_loss", "seq_load_balancing_loss", "z_loss"}
    assert all(bool((loss > 0).all()) for loss in expected.values())
    tracker.clear()
    with sliced(WAYS["uneven"]) as slicing:
        in_slices(model, rows, slicing)
    for name, entry in tracker._metrics.items():
        assert torch.allclose(entry.values, expected[name], rtol=1e-6, atol=0), (
            f"{name}: {entry.values} for {expected[name]}"
        )


def check_logged_losses_of_further_tokens_add_up() -> None:
    """Losses, correct predictions and their number, for each of two further tokens."""
    model, rows = model_of(CASES["two further tokens"], torch.float64), rows_of(LENGTH, False)
    tracker, names = MTPLossLoggingHelper.tracker, ("loss_values", "correct_values", "total_values")
    tracker.clear()
    whole(model, rows)
    expected = {name: tracker[name].clone() for name in names}
    assert all(bool((loss > 0).all()) for loss in expected.values()), expected
    for way in ("uneven", "12"):
        tracker.clear()
        with sliced(WAYS.get(way) or even_bounds(LENGTH, 12)) as slicing:
            in_slices(model, rows, slicing)
        for name, loss in expected.items():
            assert torch.allclose(tracker[name], loss, rtol=1e-6, atol=0), f"{name}: {tracker[name]} for {loss}"


def check_further_tokens_of_what_was_not_cut_are_refused() -> None:
    """A script that gives its model a copy of the labels would have no tokens after the slice's end."""
    model, (row, _) = model_of(CASES["a further token"], torch.float32), rows_of(LENGTH, False)
    with sliced(even_bounds(LENGTH, 2)) as slicing:
        for name in ("tokens", "labels", "loss_mask"):
            with slicing.cutting.at(0):
                cut = {key: slicing.cutting.cut(tensor) for key, tensor in row.items()}
                with pytest.raises(RuntimeFault, match=r"a tensor of \(2, 48\) was not cut from a row"):
                    losses_of(model, {**cut, name: cut[name].clone()})
            slicing.clear()


def check_kept_keys_take_what_is_predicted() -> None:
    """All keys and values of three layers, from a micro-batch's first forward to its first slice's backward, and once
    its backwards run also their gradients, which have as many bytes in 64 bits."""
    model, (row, _) = model_of(USUAL, torch.float64), rows_of(LENGTH, False)
    both = 3 * 2 * LENGTH * ROWS * 2 * 8 * 8
    with sliced(even_bounds(LENGTH, 3)) as slicing:
        losses, held = [], []
        for index in range(3):
            with slicing.cutting.at(index):
                losses.append(
                    part_of(
                        slicing.cutting.pad(
                            losses_of(model, {name: slicing.cutting.cut(tensor) for name, tensor in row.items()})
                        ),
                        row,
                    )
                )
            held.append(slicing.kept.nbytes)
        for index in (2, 1, 0):
            with slicing.cutting.at(index):
                losses[index].backward()
            held.append(slicing.kept.nbytes)
        assert held == [both] * 3 + [2 * both] * 3, held
        slicing.free(0, 0)
        assert (slicing.kept.nbytes, slicing.kept.peak_bytes) == (0, 2 * both)
        assert slicing.kept.memory == {0: KeptMemory(both, both)}


def check_what_is_out_of_order_is_refused() -> None:
    model, (row, _) = model_of(USUAL, torch.float32), rows_of(LENGTH, False)
    with sliced(even_bounds(LENGTH, 2)) as slicing:
        at, cut = slicing.cutting.at, slicing.cutting.cut
        with (
            at(1),
            pytest.raises(RuntimeFault, match=r"slice 1 of micro-batch 0 reached a layer that has not seen the slice"),
        ):
            losses_of(model, {name: cut(tensor) for name, tensor in row.items()})
        with at(0), pytest.raises(ValueError, match=r"the model requests positions of 96 tokens in a slice of 48"):
            losses_of(model, row)
        with at(0):
            first = part_of(
                slicing.cutting.pad(losses_of(model, {name: cut(tensor) for name, tensor in row.items()})), row
            )
        with at(0), pytest.raises(RuntimeFault, match="the backward of slice 0 runs before that of slice 1"):
            first.backward()
        with (
            at(1),
            pytest.raises(RuntimeFault, match=r"the last stage returned \(2, 96\), but with slices .* \(batch, 48\)"),
        ):
            slicing.cutting.pad(torch.zeros(2, 96))


def check_outside_of_a_slice_nothing_changes() -> None:
    model, rows = model_of(USUAL, torch.float32), rows_of(LENGTH, False)
    loss = whole(model, rows)
    expected = gradients(model)
    with sliced(even_bounds(LENGTH, 2)):
        assert whole(model, rows) == loss
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model).items())


def check_lengths_are_whole_units() -> None:
    assert even_bounds(64, 4) == (0, 16, 32, 48, 64)
    assert even_bounds(63, 4) == (0, 15, 31, 47, 63)
    assert even_bounds(20, 3, 4) == (0, 4, 12, 20)
    with pytest.raises(ValueError, match="a sequence of 63 tokens is not a multiple of 2"):
        even_bounds(63, 4, 2)
    with pytest.raises(ValueError, match=r"a sequence of 8 tokens .* into 4 slices of 4 or more: use at most 2 slices"):
        even_bounds(8, 4, 4)


class _Alone(torch.nn.Module):
    """A script's own core attention, which sees only its own slice."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query.flatten(2)


def check_layers_that_see_their_own_slice_alone_are_refused() -> None:
    with sliced(even_bounds(LENGTH, 2)):
        model = model_of(USUAL, torch.float32)
        stages.judge([model])
        model.decoder.layers[1].self_attention.core_attention = _Alone()
        with pytest.raises(ValueError, match="this model cannot be cut:\n  _Alone sees only the keys of its own"):
            stages.judge([model])
        model.decoder.layers[1].self_attention = _Alone()
        with pytest.raises(ValueError, match=r"_Alone is not one of Megatron's attention classes and sees"):
            stages.judge([model])
        model = model_of(USUAL, torch.float32)
        model.decoder.layers[0].self_attention.attn_mask_type = AttnMaskType.padding
        with pytest.raises(ValueError, match=r"SelfAttention has the mask padding, but earlier slices cannot see"):
            stages.judge([model])
        model.decoder.layers[0].cross_attention = _Alone()
        with pytest.raises(ValueError, match="TransformerLayer attends to another sequence"):
            stages.judge([model])
    with pytest.raises(ValueError, match="DotProductAttention sees only the keys of its own slice"):
        stages.judge([model_of(USUAL, torch.float32)])


def check_transformer_engine_is_asked_for_a_mask_that_ends_bottom_right() -> None:
    """A stand-in for Transformer Engine, which is not installed, records its arguments."""
    calls: list[tuple[str, int]] = []

    def stand_in(_: Any, query: Any, key: Any, value: Any, mask: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((kind.name, key.size(0)))
        return _attended(query, key, value)

    of_cutting = cuts.Cutting(even_bounds(LENGTH, 2))
    run, layer = attention._engines_attention(attention.KeptKeys(of_cutting), stand_in), torch.nn.Identity()
    own = torch.ones(48, 1, 2, 8)
    for number in (0, 1):
        with of_cutting.at(number):
            run(layer, own, own, own, None, AttnMaskType.causal)
            if not number:
                with pytest.raises(ValueError, match="slices need causal attention, but this layer's mask is no_mask"):
                    run(layer, own, own, own, None, AttnMaskType.no_mask)
    run(layer, own, own, own, None, AttnMaskType.no_mask)
    with of_cutting.at(1):
        run(layer, own, own, own, None, AttnMaskType.causal)
    # The first time, it is also tested on a mask whose answer is known.
    behind = ("causal_bottom_right", 96)
    assert calls[:4] == [("causal", 48), behind, behind, ("no_mask", 48)], calls
    assert len(calls) == 5, calls


def _attended(query: Any, key: Any, value: Any, first: int | None = None) -> Any:
    """Attention of groups of heads; by default the causal mask ends at the bottom right."""
    tokens, heads = query.size(0), query.size(2)
    before = key.size(0) - tokens if first is None else first
    key, value = (tensor.repeat_interleave(heads // tensor.size(2), 2) for tensor in (key, value))
    scores = torch.einsum("qbnh,kbnh->bnqk", query, key) / query.size(-1) ** 0.5
    hidden = torch.ones(tokens, key.size(0), dtype=torch.bool).triu(before + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bnqk,kbnh->qbnh", weights, value).flatten(2)


def check_an_engine_that_masks_otherwise_ends_the_run() -> None:
    """A mask from the top left, none, or one that is off by one is noticed: also in 16 bits, with groups of heads, and
    with values wider than keys. The check leaves the layer in training mode."""
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (
            torch.randn(tokens, 2, heads, width).to(dtype)
            for tokens, heads, width in ((8, 4, 8), (24, 2, 8), (24, 2, 12))
        )
        for first, is_right in ((16, True), (0, False), (24, False), (15, False), (17, False)):
            layer, asked = torch.nn.Dropout(0.5), []

            def attend(*tensors: Any, first: int = first, layer: Any = layer, asked: Any = asked) -> Any:
                asked.append(layer.training)
                return _attended(*tensors, first=first)

            with (
                contextlib.nullcontext()
                if is_right
                else pytest.raises(RuntimeFault, match="use --transformer-impl local")
            ):
                attention.check_mask(attend, layer, query, key, value, 16)
            assert asked == [False]
            assert layer.training


def check_lengths_of_equal_work_take_as_long() -> None:
    """Measured in FLOPs of a forward and a backward, with bounds rounded to tokens."""
    config = model_of(USUAL, torch.float32).config
    for length, number in ((4096, 4), (131072, 8)):
        share = attention_share(length, config)
        bounds = bounds_of(WORK, length, number, 1, config)
        work = [3 * (1 - share) * bound / length + 3.5 * share * (bound / length) ** 2 for bound in bounds]
        parts = [end - begin for begin, end in itertools.pairwise(work)]
        assert max(parts) - min(parts) < 4 / length * number
        lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] > 1.5 * lengths[-1]
        assert all(bound % 64 == 0 for bound in bounds_of(WORK, length, number, 64, config))
    # 8 heads of 8 channels, 2 of them with keys; an MLP of 128 with a gate.
    assert attention_share(96, config) == 64 * 96 / (64 * (2 * 64 + 2 * 16) + 3 * 64 * 128 + 64 * 96)
    assert bounds_of(WORK, 4, 4, 1, config) == (0, 1, 2, 3, 4), "each has a token"


def check_lengths_are_read_and_must_be_all_of_the_sequence() -> None:
    assert [slice_lengths(text) for text in ("even", "work", "3,2,1")] == [EVEN, WORK, (3, 2, 1)]
    for text in ("", "3,0", "3,,1", "long", "-1"):
        with pytest.raises(ValueError, match="must be even, work or a list of lengths"):
            slice_lengths(text)
    assert bounds_of((40, 32, 24), 96, 3, 8, None) == (0, 40, 72, 96)
    for lengths, unit, message in (
        ((48, 48), 1, "2 lengths for 3 slices"),
        ((40, 32, 23), 1, "add up to 95 tokens, but a sequence has 96"),
        ((40, 33, 23), 8, "a slice of 33 tokens is not a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            bounds_of(lengths, 96, 3, unit, None)
    slicing = Slicing(3, (48, 48))
    with pytest.raises(ValueError, match="--bpipe-slices 3 --bpipe-slice-lengths 48,48: 2 lengths for 3 slices"):
        slicing.begin(96, model_of(USUAL, torch.float32).config)


def setup() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
