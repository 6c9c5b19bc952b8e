"""Build any one stage of Megatron's own GPT in a process of its own, and run it.

The model comes from the trainer's flags, by its builder and with its wrappers. The other ranks do not exist: torch's fake
process group, which Megatron uses too (`--fake-process-group`), completes every collective at once and without data. So
sizes and a rank's own work are right, and values are not.
"""

import contextlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.scheduling.start import startup

# Flags that Megatron requires and a stage does not depend on; the user's come later, and win.
_DEFAULTS = ("--tokenizer-type", "NullTokenizer", "--lr", "1e-4", "--train-iters", "1", "--micro-batch-size", "1")


def parse(flags: Sequence[str], provider: Callable[..., Any], change: Callable[[Any], None] | None = None) -> Any:
    """Return Megatron's validated arguments, for a world of one replica.

    Args:
        flags: Those of the training.
        provider: Adds flags to the parser.
        change: Edits the parsed arguments.

    Raises:
        ValueError: The size of the output layer is unknown.
    """
    from megatron.training import arguments
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    sys.argv[1:] = [*_DEFAULTS, *flags]
    startup.complete_arguments()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    args = arguments.parse_args(provider)
    if change is not None:
        change(args)
    # One process represents all, so there are no ranks to exchange.
    args.bpipe_placement = "none"
    args.world_size = ranks_of_a_stage(args) * args.pipeline_model_parallel_size
    arguments.validate_args(args, {})
    if args.padded_vocab_size is None:
        if args.vocab_size is None:
            raise ValueError("the size of the output layer is not known: give --vocab-size")
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
        )
    return args


@contextlib.contextmanager
def refusing(refusal: str) -> Iterator[None]:
    """Raise ValueError, which begins with `refusal`, for flags that Megatron refuses to parse or build here."""
    try:
        yield
    except (AssertionError, ImportError) as error:
        # Some of Megatron's checks have no message; then the line that failed says it.
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ValueError(f"{refusal}: {reason}") from error


def measured(args: Any) -> dict[str, Any]:
    """Return facts of a measured stage: its file cannot be read for setups that differ in them."""
    return {
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "tensor": args.tensor_model_parallel_size,
        "sequence": args.seq_length,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    }


def ranks_of_a_stage(args: Any) -> int:
    """Return the fewest ranks of one stage: experts may be distributed over several replicas of the rest."""
    of_experts = (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) * args.expert_model_parallel_size
    return math.lcm(args.tensor_model_parallel_size * args.context_parallel_size, of_experts)


@contextlib.contextmanager
def chunks(args: Any, place: int) -> Iterator[Sequence[Any]]:
    """Return the model's chunks on the first rank at `place` in the pipeline, with the trainer's wrappers."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.training import get_megatron_ddp_config

    with fake_world(place * ranks_of_a_stage(args), args.world_size):
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            # One of several replicas would wait for the others.
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        config = gpt_config_from_args(args)
        config.finalize()
        builder = config.get_builder_cls()(config)
        yield builder.build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(),
            get_megatron_ddp_config(args),
            data_parallel_random_init=False,
        )


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world whose other ranks do not exist. Afterwards there are no groups, not even Megatron's."""
    from megatron.core import parallel_state
    from torch._C._distributed_c10d import HashStore
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    # A real store, in which nobody waits: Megatron also makes gloo groups, and torch 2.11 cannot make even those of one
    # rank with a fake store.
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class Runner:
    """Runs micro-batches of one size through a stage, forward and backward, as the trainer's loop does."""

    def __init__(self, args: Any, model: torch.nn.Module, micro_batch: int) -> None:
        from megatron.core.utils import get_attr_wrapped_model, unwrap_model

        self.model = model
        self.set_input = get_attr_wrapped_model(model, "set_input_tensor")
        self.first, self.last = (get_attr_wrapped_model(model, name) for name in ("pre_process", "post_process"))
        # Prediction of further tokens embeds them again, after the last layer, and sends hidden states of each.
        predicts_further = bool(getattr(unwrap_model(model), "mtp_process", False))
        self.embeds = self.first or predicts_further
        self.predictions = 1 + (args.mtp_num_layers or 0)
        shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
        device, length = torch.device(torch.cuda.current_device()), args.seq_length // args.context_parallel_size
        rows, row = length // shards, (micro_batch, args.hidden_size)
        received = rows * (self.predictions if self.last and not predicts_further else 1)
        sent = rows * (self.predictions if predicts_further else 1)
        self.received = torch.randn((received, *row), dtype=args.params_dtype, device=device, requires_grad=True)
        self.gradient = torch.randn((sent, *row), dtype=args.params_dtype, device=device)
        size = (micro_batch, length)
        self.tokens, self.labels = (torch.randint(args.vocab_size, size, device=device) for _ in range(2))
        self.positions = torch.arange(length, device=device).expand(size).contiguous()
        self.mask = torch.ones(size, device=device)

    @property
    def inputs(self) -> list[torch.Tensor | None]:
        """Inputs that the stage receives for a micro-batch."""
        return [None if self.first else self.received]

    def forward(self) -> torch.Tensor:
        """Return the stage's output; the last stage's is the loss."""
        self.set_input(self.inputs)
        tokens, positions = (self.tokens, self.positions) if self.embeds else (None, None)
        # As Megatron's own script does; only losses of further tokens read the mask inside the model.
        masked = {"loss_mask": self.mask} if self.last and self.predictions > 1 else {}
        output = self.model(tokens, positions, None, labels=self.labels if self.last else None, **masked)
        return self._loss(output) if self.last else output

    def after_layers(self) -> torch.Tensor:
        """Run the rest of the last stage: the final norm, the output layer, the loss."""
        from megatron.core.utils import unwrap_model

        model = unwrap_model(self.model)
        hidden = model.decoder.final_layernorm(self.received)
        logits, _ = model.output_layer(hidden)
        return self._loss(model.compute_language_model_loss(self.labels, logits))

    def _loss(self, output: torch.Tensor) -> torch.Tensor:
        """Return the sum of all tokens' losses, scaled as in the trainer."""
        loss = torch.sum(output.view(-1).float() * self.mask.view(-1))
        loss /= torch.clamp(self.mask.sum().to(torch.int), min=1)
        loss /= 1  # micro-batches
        return loss

    def backward(self, output: torch.Tensor) -> None:
        torch.autograd.backward(output, None if self.last else self.gradient)
