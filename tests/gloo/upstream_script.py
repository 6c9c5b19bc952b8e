"""A training script that calls Megatron as Megatron-LM 0.19's own pretrain_gpt.py does: a built configuration, ranks
with embeddings, and, while a chunk computes, whether this is the first or the last stage.

It does not know this project. Its data are those of plain_script.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage

from tests.gloo.plain_script import datasets, flags


def batch(data: Any, stage: int | None) -> dict[str, torch.Tensor | None]:
    """Return a chunk's part of its next micro-batch: tokens for the first stage, labels and their mask for the last.

    Only the first question names the chunk."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    predicts_further = mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=stage,
    )
    if not is_first_or_last_pipeline_stage(stage) and not predicts_further:
        return {}
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    return get_batch_on_this_tp_rank(
        {key: value.cuda() for key, value in next(data).items()} if tp_rank == 0 else {},
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_further,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )


def masked_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss, num_tokens = (losses.float() * mask).sum(), mask.sum().int()
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward(data: Any, module: Any) -> tuple[torch.Tensor, Any]:
    inputs = batch(data, get_attr_wrapped_model(module, "vp_stage"))
    tokens, positions, labels, mask = (inputs.get(key) for key in ("tokens", "position_ids", "labels", "loss_mask"))
    return module(tokens, positions, None, labels=labels, loss_mask=mask), partial(masked_loss, mask)


def ranks_with_embeddings(pp_ranks: list[int]) -> list[int]:
    """Return the ranks of the first stage, of the last if it is tied, and of layers that predict further tokens."""
    args = get_args()
    if len(pp_ranks) == 1:
        return pp_ranks
    tied = [] if args.untie_embeddings_and_output_weights else [pp_ranks[-1]]
    return sorted({pp_ranks[0], *tied, *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))})


if __name__ == "__main__":
    arguments = parse_and_validate_args(extra_args_provider=flags)
    pretrain(
        pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments)),
        datasets,
        ModelType.encoder_or_decoder,
        forward,
        get_embedding_ranks=ranks_with_embeddings,
    )
