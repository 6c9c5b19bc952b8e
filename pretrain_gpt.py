"""Train a GPT with the installed Megatron, with or without `--bpipe`.

In: Megatron's flags and ours. Out: what Megatron's trainer writes.

Thin on purpose: a model from Megatron's own builder, datasets from its builder, its loss convention, its `pretrain`.
Launch with torchrun, one process a rank.
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
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank  # noqa: E402
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, set_startup_timestamps  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.utils.common_utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage  # noqa: E402

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None
) -> tuple[torch.Tensor | None, ...]:
    """This rank's part of the next micro-batch: tokens, labels, loss mask, attention mask, positions; all None on
    inner stages."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return (None,) * len(_BATCH_KEYS)
    args = get_args()
    group = parallel_state.get_tensor_model_parallel_group()
    batch: dict[str, Any] = {}
    if group.rank() == 0:
        assert data_iterator is not None
        loaded = next(data_iterator)
        batch = {key: loaded[key].cuda(non_blocking=True) if key in loaded else None for key in _BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
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
    batch.setdefault("cu_seqlens", None)
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())
    return tuple(batch.get(key) for key in _BATCH_KEYS)


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss of one micro-batch, its number of tokens, and both again for the log (Megatron divides them
    there)."""
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
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(
        data_iterator, get_attr_wrapped_model(model, "vp_stage")
    )
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Train, validation and test datasets, built where a stage reads tokens or labels."""
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
    )

    def built_here() -> bool:
        return is_first_or_last_pipeline_stage(vp_stage) and parallel_state.get_tensor_model_parallel_rank() == 0

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, built_here, config).build()


# Every rank calls the provider; it decides itself where a dataset is built.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    launch.require(args, "pretrain_gpt")
    launch.refuse_packed(args)
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
