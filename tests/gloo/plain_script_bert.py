"""Train Megatron's BERT in an independent script: every stage needs the padding mask of each micro-batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from plain_script import datasets

MASK = 0


def model(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **kwargs: Any) -> BertModel:
    args = get_args()
    return BertModel(
        config=core_transformer_config_from_args(args),
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
        vp_stage=vp_stage,
    )


def masked_loss(masked: torch.Tensor, second: torch.Tensor, output: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Return the loss of the masked tokens, and of predicting whether the sample begins with an even token."""
    losses, of_sample = output
    words = (losses.float() * masked).sum() / masked.sum().clamp(min=1)
    order = torch.nn.functional.cross_entropy(of_sample.float(), second)
    return words + order, {"lm loss": words.detach().clone(), "sop loss": order.detach().clone()}


def forward(data: Any, module: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)["tokens"].cuda()
    # The first token determines how many tokens at the end are padding.
    lengths = tokens.size(1) - tokens[:, :1] % 8
    present = torch.arange(tokens.size(1), device=tokens.device) < lengths
    masked = (tokens % 7 == 3) & present
    types = (torch.arange(tokens.size(1), device=tokens.device) >= tokens.size(1) // 2).long().expand_as(tokens)
    output = module(tokens.masked_fill(masked, MASK), present.long(), tokentype_ids=types, lm_labels=tokens)
    return output, partial(masked_loss, masked, tokens[:, 0] % 2)


datasets_everywhere = partial(datasets, on_every_stage=True)
datasets_everywhere.is_distributed = True  # type: ignore[attr-defined]

if __name__ == "__main__":
    arguments = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(arguments), datasets_everywhere, ModelType.encoder_or_decoder, forward, model
    )
