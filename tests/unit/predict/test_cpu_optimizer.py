"""What Megatron's `HybridDeviceOptimizer` holds on the device and on the CPU, compared with the prediction. Meta
tensors stand in for a device's."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from bpipe.cli import main
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.options import setup_from
from bpipe.plan.ways import ways_to_fit
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.layout import Setup
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import PRESETS
from bpipe.predict.states import cpu_optimizer_bytes, rank_parameters
from bpipe.predict.training import StateTypes, Switches

torch = pytest.importorskip("torch")
# Equal parameters, so that any quarter of them can be offloaded.
COUNT, SIZE = 4, 1000
LLAMA = Setup(PRESETS["llama3-8b"], parse_cluster("h100-80g:1x8"), 2, 2, 1, 64, 8192, (16, 16), "none", "flash")


def with_share(share: float, *, short_gradients: bool = False) -> Setup:
    types = StateTypes(True, optimizer_cpu_offload=True, optimizer_offload_fraction=share)
    return replace(LLAMA, state_types=types, switches=Switches(grad_reduce_in_bf16=short_gradients))


@contextlib.contextmanager
def meta_is_a_device() -> Iterator[None]:
    """Let tensors of the meta device pass for a GPU's."""
    copy, empty, stream = torch.Tensor.copy_, torch.empty, mock.MagicMock()

    def copied(self: Any, source: Any, **_: object) -> Any:
        return self if source.is_meta and not self.is_meta else copy(self, source)

    with (
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: self.is_meta)),
        mock.patch.object(torch.Tensor, "cpu", lambda self: torch.zeros(self.shape, dtype=self.dtype)),
        mock.patch.object(torch.Tensor, "pin_memory", lambda self: self),
        mock.patch.object(torch.Tensor, "copy_", copied),
        mock.patch.object(torch, "empty", lambda *shape, pin_memory=False, **kind: empty(*shape, **kind)),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "stream", contextlib.nullcontext),
    ):
        yield


def held_by_megatrons(share: float, gradients: Any) -> tuple[float, float]:
    """Return bytes per parameter on the device and on the CPU after an update, besides 16-bit weights and gradients."""
    package = importlib.util.find_spec("megatron.core")
    if package is None:
        pytest.skip("megatron-core is not installed")
    path = f"{package.submodule_search_locations[0]}/optimizer/cpu_offloading/hybrid_optimizer.py"  # type: ignore[index]
    spec = importlib.util.spec_from_file_location("hybrid_optimizer", path)
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    weights = [torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16, device="meta")) for _ in range(COUNT)]
    with meta_is_a_device():
        adam = torch.optim.AdamW
        optimizer = module.HybridDeviceOptimizer(
            weights, share, adam, adam, param_update_in_fp32=True, overlap_cpu_optimizer_d2h_h2d=False, lr=0.1
        )
        gradient_tensors = [torch.zeros(SIZE, dtype=gradients, device="meta") for _ in weights]
        for weight, gradient in zip(weights, gradient_tensors, strict=True):
            weight.decoupled_grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    inner = [
        weight
        for sub_optimizer in optimizer.sub_optimizers
        for group in sub_optimizer.param_groups
        for weight in group["params"]
    ]
    tensors = [*inner, *(weight.grad for weight in inner)]
    tensors += [
        value
        for sub_optimizer in optimizer.sub_optimizers
        for state in sub_optimizer.state.values()
        for value in state.values()
    ]
    storages = {
        tensor.untyped_storage()._cdata: tensor
        for tensor in tensors
        if tensor is not None and tensor.numel() == SIZE and not any(tensor is own for own in gradient_tensors)
    }
    both = [0.0, 0.0]
    for tensor in storages.values():
        both[not tensor.is_meta] += tensor.nbytes / (COUNT * SIZE)
    return both[0], both[1]


@pytest.mark.parametrize("short_gradients", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 1.0])
def test_bytes_are_megatrons(share: float, short_gradients: bool) -> None:
    setup = with_share(share, short_gradients=short_gradients)
    device, cpu = held_by_megatrons(share, torch.bfloat16 if short_gradients else torch.float32)
    parts = zip(predict_memory(setup), cpu_optimizer_bytes(setup), rank_parameters(setup), strict=True)
    for memory, on_cpu, count in parts:
        assert memory.optimizer_bytes == pytest.approx(device * count / setup.replicas, rel=1e-6)
        assert on_cpu == pytest.approx(cpu * count / setup.replicas, rel=1e-6)
        assert memory.update_bytes == 0


def test_only_transfers_are_timed_and_the_rest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    setup = with_share(0.5)
    assert predict_costs(setup).stages[0].optimizer_s > 5 * predict_costs(with_share(0.0)).stages[0].optimizer_s
    words = megatron_flags(setup)
    assert setup_from(words, setup.cluster, setup.padded_vocabulary, "gpu").state_types == setup.state_types
    assert main(["simulate", "--cluster", "h100-80g:1x8", "--vocab-size", "128256", "--", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "GiB of CPU memory for a device of rank 1, the most of all" in printed
    assert "how long the CPU takes for the update is not known" in printed


def test_fit_proposes_it_behind_what_is_timed() -> None:
    """Its time is not known, so it comes after the others."""
    ways = ways_to_fit(replace(LLAMA, recompute="full"))
    offloaded = [way.setup.state_types.optimizer_cpu_offload for way in ways if way.can_run]
    assert any(offloaded)
    assert offloaded == sorted(offloaded)
