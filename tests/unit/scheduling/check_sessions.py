"""Stages of Megatron's own model under `terra.Session`: every byte is the same as without a session."""

import contextlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._C._distributed_c10d import HashStore

import terra

HIDDEN, LENGTH, BATCH, TOKENS = 32, 8, 2, 64
ORDER = "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
ITERATIONS = 5
STAGES = {"first": (True, False), "middle": (False, False), "last": (False, True)}


class Stage:
    """Runs its passes as the pipelined loop does; random numbers by micro-batch replace the other stages."""

    def __init__(self, is_first: bool, is_last: bool, dropout: float) -> None:
        tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        torch.manual_seed(1234)
        self.is_first, self.is_last = is_first, is_last
        self.config = TransformerConfig(
            num_layers=2,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            use_cpu_initialization=True,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            deallocate_pipeline_outputs=True,
        )
        spec = get_gpt_layer_local_spec()
        model = GPTModel(
            self.config, spec, TOKENS, LENGTH, is_first, is_last, share_embeddings_and_output_weights=False
        )
        self.model = DistributedDataParallel(
            self.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        self.under_way: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        # Outputs and the gradients of inputs, in the order of the passes.
        self.sent: list[torch.Tensor] = []

    def iteration(self, number: int) -> None:
        """Add up the gradients of all micro-batches, then update the weights."""
        self.model.zero_grad_buffer()
        for name in ORDER.split():
            (self.forward if name[0] == "F" else self.backward)(10 * number + int(name[1:]))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(parameter.main_grad, alpha=0.01)

    def forward(self, microbatch: int) -> None:
        generator = torch.Generator().manual_seed(microbatch)
        received = None if self.is_first else torch.randn(LENGTH, BATCH, HIDDEN, generator=generator).requires_grad_()
        tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=generator)
        self.model.module.set_input_tensor(received)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        output = self.model(
            tokens, torch.arange(LENGTH).expand(BATCH, LENGTH), mask, labels=tokens if self.is_last else None
        )
        if self.is_last:
            output = output.mean()
        self.sent.append(output.detach().clone())
        self.under_way[microbatch] = received, output
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs and not self.is_last)

    def backward(self, microbatch: int) -> None:
        received, output = self.under_way.pop(microbatch)
        generator = torch.Generator().manual_seed(1000 + microbatch)
        gradient = None if self.is_last else torch.randn(LENGTH, BATCH, HIDDEN, generator=generator)
        schedules.backward_step(received, output, gradient, self.config)
        if received is not None:
            assert received.grad is not None
            self.sent.append(received.grad.clone())

    def left(self) -> dict[str, torch.Tensor]:
        """Copies of everything that the iterations leave."""
        tensors = {f"sent {place}": sent for place, sent in enumerate(self.sent)}
        for name, parameter in self.model.named_parameters():
            tensors |= {name: parameter.detach().clone(), f"{name}.main_grad": parameter.main_grad.clone()}
        states = tensor_parallel.get_cuda_rng_tracker().get_states()
        return (
            tensors
            | {f"random state {name}": state.clone() for name, state in states.items()}
            | {"random state": torch.get_rng_state()}
        )


def trained(kind: tuple[bool, bool], dropout: float, session: terra.Session | None) -> list[dict[str, torch.Tensor]]:
    """The state after each iteration."""
    stage, states = Stage(*kind, dropout), []
    for number in range(ITERATIONS):
        with session or contextlib.nullcontext():
            stage.iteration(number)
        states.append(stage.left())
        stage.sent.clear()
    return states


def check_stages_compute_the_same_under_a_session() -> None:
    for name, kind in STAGES.items():
        for dropout in (0.0, 0.1):
            expected = trained(kind, dropout, None)
            label = f"{name} stage, dropout {dropout}"
            with contextlib.closing(terra.Session()) as session:
                same(expected, trained(kind, dropout, session), label)
                assert (session.traces, session.fallbacks, session.co_executed) == (2, 0, ITERATIONS - 3), label


def same(expected: list[dict[str, torch.Tensor]], actual: list[dict[str, torch.Tensor]], name: str) -> None:
    for number, (expected_state, state) in enumerate(zip(expected, actual, strict=True)):
        assert expected_state.keys() == state.keys()
        gradients = [key for key in expected_state if key.endswith(".main_grad")]
        assert gradients
        assert all(expected_state[key].any() for key in gradients), (
            f"{name}: a gradient is all zeros, which what was forgotten is too"
        )
        for key in expected_state:
            assert _bytes(expected_state[key]) == _bytes(state[key]), f"{name}, iteration {number}: {key} differs"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def setup() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
