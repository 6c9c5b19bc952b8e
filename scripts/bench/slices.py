"""Measure what cutting sequences costs to compute: processor time of an iteration in slices beside a whole one, of the
same tokens.

In: sizes. Out: a table on stdout. One process computes forwards and backwards of two of Megatron's GPT layers on a CPU,
one thread. Whole and sliced iterations take turns; every figure is the median of --rounds of their ratios, with the
least and the most behind it. Masked scores that a whole iteration computes in vain hide what small slices lose, so
--without-scores leaves scores out: all else of a layer is left. What it cannot show: a GPU, whose small kernels lose
more, fused attention, and waiting, which slices make less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from megatron.scheduling.start import startup

startup.prepare()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402

from bpipe.ir.layout import EVEN, WORK  # noqa: E402
from megatron.scheduling.hooks import patches  # noqa: E402
from megatron.scheduling.slices.slicing import Slicing  # noqa: E402

SLICES = (1, 2, 4, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, metavar="N")
    parser.add_argument("--sequences", type=int, nargs="+", default=[512, 1024, 2048], metavar="N")
    parser.add_argument("--lengths", choices=(EVEN, WORK), default=EVEN)
    parser.add_argument("--without-scores", action="store_true", help="give values as they are in place of attention")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    stage = _stage(options.hidden, options.without_scores)
    scores = ", no scores" * options.without_scores
    print(
        f"hidden {options.hidden}, 2 layers{scores}, slices {options.lengths}; processor time of an iteration, whole = 1"
    )
    print("tokens  " + "".join(f"{number:>4} slices        " for number in SLICES))
    for length in options.sequences:
        ratios = _ratios(stage, length, options.lengths, options.rounds)
        cells = (f"{statistics.median(one):.2f} ({min(one):.2f}-{max(one):.2f})".ljust(19) for one in ratios)
        print(f"{length:<8}" + "".join(cells), flush=True)
    return 0


class _Values(torch.nn.Module):
    """In place of a core attention: uses what it is given, and computes no scores."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return (query + key + value).flatten(2)


def _stage(hidden: int, without_scores: bool) -> TransformerBlock:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
    )
    stage = TransformerBlock(config, get_gpt_layer_local_spec(), post_process=False).train()
    for layer in stage.layers if without_scores else ():
        layer.self_attention.core_attention = _Values()
    return stage


def _ratios(stage: TransformerBlock, length: int, lengths: str, rounds: int) -> list[list[float]]:
    """By number of slices, a ratio a round."""
    row = torch.randn(length, 1, stage.config.hidden_size)
    found: list[list[float]] = [[] for _ in SLICES]
    for number in range(rounds + 1):
        whole = _seconds(stage, row, None)
        for each, ratios in zip(SLICES, found, strict=True):
            slicing = Slicing(each, lengths)
            slicing.begin(length, stage.config)
            # The first round warms up.
            ratio = _seconds(stage, row, slicing) / whole
            if number:
                ratios.append(ratio)
    return found


def _seconds(stage: TransformerBlock, row: torch.Tensor, slicing: Slicing | None) -> float:
    """Of one iteration, by the processor's clock."""
    stage.zero_grad()
    begin = time.process_time()
    if slicing is None:
        _compute(stage, [row])
        return time.process_time() - begin
    installed = patches.install(slicing.wraps())
    try:
        _compute_slices(stage, row, slicing)
        return time.process_time() - begin
    finally:
        installed.remove()


def _compute(stage: TransformerBlock, rows: Sequence[torch.Tensor]) -> None:
    for row in rows:
        stage(row.requires_grad_(), None).sum().backward()


def _compute_slices(stage: TransformerBlock, row: torch.Tensor, slicing: Slicing) -> None:
    cutting, made = slicing.cutting, []
    for number in range(cutting.slices):
        with cutting.at(number):
            begin, end = cutting.span
            made.append(stage(row[begin:end].detach().requires_grad_(), None).sum())
    for number in reversed(range(cutting.slices)):
        with cutting.at(number):
            made.pop().backward()
    slicing.free(0, 0)


if __name__ == "__main__":
    raise SystemExit(main())
