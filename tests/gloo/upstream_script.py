"""A training script that gives Megatron what Megatron-LM 0.19's own pretrain_gpt.py does: a built configuration, and
ranks with embeddings.

It has never heard of this project. Its data and its loss are those of plain_script.py.
"""

from __future__ import annotations

from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

from tests.gloo.plain_script import datasets, flags, forward


def ranks_with_embeddings(pp_ranks: list[int]) -> list[int]:
    """The first stage's; the last stage's where it shares the weight; and those of layers that predict further
    tokens."""
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
