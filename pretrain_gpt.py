"""Train a GPT with the installed Megatron, with or without `--bpipe`.

Model, datasets, loss and `pretrain` are Megatron's own. With `--sft` the datasets are its conversations, packed into rows.
Launch it with torchrun, one process per rank.
"""

from __future__ import annotations

import time

_PROGRAM_START = time.time()

from megatron.scheduling import launch  # noqa: E402

launch.prepare()  # before anything of megatron.core is imported

from collections.abc import Callable, Iterator  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.utils import (  # noqa: E402
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, set_startup_timestamps  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.datasets.sft_dataset import SFTDataset  # noqa: E402
from megatron.training.training import update_seqlen_stats_from_cu_seqlens  # noqa: E402
from megatron.training.utils.common_utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage  # noqa: E402

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_PACKED_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def has_packed_rows() -> bool:
    """Whether a row is several sequences, whose ends every stage has to know."""
    args = get_args()
    return bool(args.sft or args.dataloader_inter_document_masking)


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None) -> dict[str, Any]:
    """Return this rank's part of the next micro-batch by `_BATCH_KEYS`, all None on inner stages, and, for packed rows, the
    ends of sequences."""
    packed = has_packed_rows()
    reads = is_first_or_last_pipeline_stage(vp_stage)
    if not reads and not packed:
        return dict.fromkeys(_BATCH_KEYS)
    args = get_args()
    group = parallel_state.get_tensor_model_parallel_group()
    batch: dict[str, Any] = {}
    if group.rank() == 0:
        assert data_iterator is not None
        loaded = next(data_iterator)
        keys = (*_BATCH_KEYS, *_PACKED_KEYS)
        batch = {key: loaded[key].cuda(non_blocking=True) if key in loaded else None for key in keys}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=group,
        cp_size=args.context_parallel_size,
        tp_rank=group.rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=args.mtp_num_layers is not None,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not reads:
        return {**batch, **dict.fromkeys(_BATCH_KEYS)}
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=parallel_state.get_context_parallel_group(),
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )


def packed_sequences(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Return the sequences of a packed row for attention and FLOPs; None if a row is one sequence."""
    if batch.get("cu_seqlens") is None:
        return None
    ends, padded, longest = (None if batch[key] is None else batch[key].squeeze(0) for key in _PACKED_KEYS)
    assert ends is not None
    assert longest is not None
    update_seqlen_stats_from_cu_seqlens(ends)
    told = ends if padded is None else padded
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=told,
        cu_seqlens_kv=told,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=int(longest),
        max_seqlen_kv=int(longest),
        total_tokens=int(told[-1]),
        tokens_per_sample=get_args().seq_length,
    )


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a micro-batch, its number of tokens, and both for the log, where Megatron divides them."""
    losses = output_tensor.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=reject,
                message=f"{what} in the local forward loss",
                tolerance=0.0,
                fatal=True,
            )
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Run one micro-batch through this stage's part of the model.

    `return_schedule_plan`: return in place of the output what Megatron's combined 1F1B runs layer by layer.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    tokens, labels, loss_mask, attention_mask, position_ids = (batch.get(key) for key in _BATCH_KEYS)
    packed = packed_sequences(batch)
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    told = {} if packed is None else {"packed_seq_params": packed}
    output = run(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, **told)
    return output, partial(loss_func, loss_mask)


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Return training, validation and test datasets, built on stages that read tokens, labels or ends of sequences."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        context_parallel_size=args.context_parallel_size,
        inter_document_masking=args.dataloader_inter_document_masking,
    )

    def built_here() -> bool:
        reads = has_packed_rows() or is_first_or_last_pipeline_stage(vp_stage)
        return reads and parallel_state.get_tensor_model_parallel_rank() == 0

    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, built_here, config).build()


# Every rank calls the provider; it decides itself where a dataset is built.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    launch.refuse_packed_batches(args)
    if args.sft:
        # Conversations come without masks, and Megatron switches these off for documents apart only.
        args.create_attention_mask_in_dataloader = False
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
