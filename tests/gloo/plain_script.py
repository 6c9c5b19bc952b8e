"""A user's training script for Megatron, independent of this project: with its own flag, model, data and loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def flags(parser: Any) -> Any:
    parser.add_argument("--label-shift", type=int, default=1)
    return parser


def model(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **kwargs: Any) -> GPTModel:
    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        vp_stage=vp_stage,
    )


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def forward(data: Any, module: Any) -> tuple[torch.Tensor, Any]:
    args = get_args()
    sample = {key: value.cuda() for key, value in next(data).items()} if data is not None else {}
    labels = sample.get("tokens")
    if labels is not None:
        labels = labels.roll(-args.label_shift, dims=1)
    return module(sample.get("tokens"), sample.get("position_ids"), None, labels=labels), partial(mean_loss)


def datasets(num_samples: list[int], on_every_stage: bool = False, vp_stage: int | None = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )

    def here() -> bool:
        return on_every_stage or parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()

    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, here, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]

if __name__ == "__main__":
    arguments = parse_and_validate_args(extra_args_provider=flags)
    # By name, because the order differs between versions of Megatron.
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(arguments),
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward,
        model_provider=model,
    )
