"""Everything private of `torch.distributed.pipelining` that this project uses; a torch without it is refused.

This is the only module of `bpipe` that imports torch's pipelining and knows the differences among its versions.
`scripts/test_torch.sh` runs the tests with one of `RUN_VERSIONS`. From 2.11 to 2.15 `_initialize_stages` got two keywords
and `_maybe_compute_loss` one, which are passed on. What else changed:

  2.11  an argument of the pipeline is a `_RootArgPlaceholder`; later it is a `_RecvInfo` without a buffer; the handshake
        sends from a stage to the next one on its own rank, too
  2.15  a stage keeps a `_ForwardChunkState` in place of the pair in `fwd_cache`; buffers to receive into are made at the
        RECV and dropped at the computation, not kept for ever; lists of actions contain the waits for sends
"""

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch

# docs/pipelining.md lists what ran with each.
RUN_VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")

_SCHEDULES, _STAGE = "torch.distributed.pipelining.schedules", "torch.distributed.pipelining.stage"


class UnfitTorch(RuntimeError):
    """The installed torch is not one whose pipelining bpipe can use."""


class TorchName(NamedTuple):
    """A name in torch."""

    module: str
    name: str

    parameters: str = ""
    """Its first parameters that are used here, separated by spaces."""


_RUNTIME, _BASE = "_PipelineScheduleRuntime", "_PipelineStageBase"
NAMES = (
    TorchName(_SCHEDULES, "get_schedule_class", "schedule_name"),
    TorchName(_SCHEDULES, "PipelineScheduleSingle", "stage n_microbatches loss_fn"),
    TorchName(_SCHEDULES, "PipelineScheduleMulti", "stages n_microbatches loss_fn"),
    TorchName(_SCHEDULES, f"{_RUNTIME}._prepare_schedule_with_comms", "self actions"),
    TorchName(_SCHEDULES, f"{_RUNTIME}._step_microbatches", "self arg_mbs kwarg_mbs target_mbs losses"),
    TorchName(_SCHEDULES, f"{_RUNTIME}._initialize_stages", "self args kwargs"),
    TorchName(_SCHEDULES, f"{_RUNTIME}._maybe_compute_loss", "self stage output target_mbs mb_index"),
    TorchName(_SCHEDULES, "_Action", "stage_index computation_type microbatch_index sub_actions"),
    TorchName(_SCHEDULES, "_ComputationType"),
    TorchName(_SCHEDULES, "_check_torch_compile_compatibility", "stages schedule_name"),
    TorchName(_STAGE, f"{_BASE}.forward_one_chunk", "self fwd_chunk_id"),
    TorchName(_STAGE, f"{_BASE}.backward_one_chunk", "self bwd_chunk_id loss full_backward"),
    TorchName(_STAGE, f"{_BASE}.backward_weight_one_chunk", "self bwd_chunk_id"),
)
KINDS = (
    *("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"),
    *("SEND_F", "SEND_B", "RECV_F", "RECV_B"),
)
# Attributes of a schedule and of its stages that are read, which only objects have.
OF_SCHEDULE = (
    *("_has_backward", "_internal_losses", "_loss_fn", "_n_microbatches", "_num_stages", "_stages"),
    *("pipeline_order", "pipeline_order_with_comms", "pp_group_size", "rank", "scale_grads"),
    "stage_index_to_group_rank",
)
OF_STAGE = (
    *("args_recv_info", "backward_state", "clear_runtime_states", "device", "dw_builder", "grad_recv_info", "group"),
    *("group_rank", "group_size", "is_first", "is_last", "num_stages", "set_local_fwd_input", "stage_index", "submod"),
)
# Names of what a stage keeps of its forwards: since 2.15, and before.
FORWARDS = ("_forward_chunk_states", "fwd_cache")


def lacking() -> list[str]:
    """Return the names and parameters of the table that the installed torch lacks."""
    missing = []
    for module, name, parameters in NAMES:
        value: Any = import_module(module)
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is None:
            missing.append(name)
            continue
        signature = inspect.signature(value).parameters if parameters else {}
        missing += [f"{name}({parameter})" for parameter in parameters.split() if parameter not in signature]
    kinds = getattr(import_module(_SCHEDULES), "_ComputationType", None)
    return missing + [f"_ComputationType.{kind}" for kind in KINDS if kinds is not None and not hasattr(kinds, kind)]


def _require(missing: list[str]) -> None:
    if missing:
        raise UnfitTorch(
            f"torch {torch.__version__} cannot be used by bpipe.torch: torch.distributed.pipelining has no "
            f"{', '.join(missing)}. Install one of torch {', '.join(RUN_VERSIONS)}, or use its own schedules"
        )


def require_attributes(schedule: object, stages: list[Any]) -> None:
    """Raise UnfitTorch if a schedule or one of its stages lacks an attribute that is read."""
    of_stages = [f"stage.{name}" for name in OF_STAGE if not all(hasattr(stage, name) for stage in stages)]
    if not all(any(hasattr(stage, name) for name in FORWARDS) for stage in stages):
        of_stages.append(f"stage.{' or stage.'.join(FORWARDS)}")
    _require([name for name in OF_SCHEDULE if not hasattr(schedule, name)] + of_stages)


_require(lacking())

_schedules: Any = import_module(_SCHEDULES)
_stage: Any = import_module(_STAGE)
Runtime: Any = _schedules._PipelineScheduleRuntime
SingleStage: Any = _schedules.PipelineScheduleSingle
TorchAction: Any = _schedules._Action
Computation: Any = _schedules._ComputationType
schedule_class: Any = _schedules.get_schedule_class
refuse_compiled: Any = _schedules._check_torch_compile_compatibility
# Waits for sends in a list of actions, since 2.15. `_add_wait_send` puts each after the backward of what was sent, or at
# the end: by then it has arrived, so the wait is over at once.
SEND_WAITS: tuple[Any, ...] = tuple(kind for kind in Computation if kind.name in ("WAIT_SEND_F", "WAIT_SEND_B"))
# Whether the handshake sends from a rank to itself.
_SENDS_TO_ITSELF = not hasattr(_stage.PipelineStage, "_is_same_rank")
# Whether torch keeps a buffer for every micro-batch's input and gradient from the first run on.
KEEPS_BUFFERS = not hasattr(_stage._RecvInfo, "take_buffer")


def ran_forward(stage: Any, microbatch: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the outputs of a stage's forward of a micro-batch, and its inputs: positional arguments, then keywords."""
    if hasattr(stage, "fwd_cache"):
        outputs, inputs = stage.fwd_cache[microbatch]
        return outputs, inputs
    state = stage._forward_chunk_states[microbatch]
    return state.live_outputs, state.input_values


def receive_buffers(infos: Sequence[Any]) -> list[torch.Tensor]:
    """Return the present buffers of what a stage receives; the pipeline's own arguments have none."""
    buffers = (getattr(info, "buffer", None) for info in infos)
    return [buffer for buffer in buffers if buffer is not None]


def receive_zeros(stage: Any, microbatch: int) -> None:
    """Fill the buffers for what another rank sends a stage for a micro-batch with zeros."""
    with torch.no_grad():
        for info in stage.args_recv_info[microbatch]:
            (info.buffer if KEEPS_BUFFERS else info.allocate_buffer(stage.device)).zero_()


def refuse_sends_to_itself(stages: Sequence[Any], device: torch.device) -> None:
    """Raise ValueError if torch's handshake would send from this rank to itself over gloo, which does not support that."""
    indices = {int(stage.stage_index) for stage in stages}
    folds = next((index for index in sorted(indices) if index + 1 in indices), None)
    if _SENDS_TO_ITSELF and device.type == "cpu" and folds is not None:
        raise ValueError(
            f"stages {folds} and {folds + 1} are on one rank: torch {torch.__version__} sends from one to the other "
            "before the first step, which gloo cannot. Use torch 2.12 or newer, or stages that are not placed as a V"
        )
