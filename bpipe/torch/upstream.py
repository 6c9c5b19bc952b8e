"""Name everything private of `torch.distributed.pipelining` that this project uses, and refuse a torch without it.

In: the installed torch. Out: its classes under the names used here, or `UnfitTorch` with what is missing. The only module of
`bpipe` that imports torch's pipelining. Replaces nothing.

Signatures were compared in the sources of 2.11, 2.12, 2.13 and 2.14; what is run by tests is 2.14.1. In these
`forward_one_chunk`, `backward_one_chunk`, `backward_weight_one_chunk` and the loop over `pipeline_order_with_comms` are
identical, `_initialize_stages` grew two keywords and `_maybe_compute_loss` one, which are passed on as they come.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, NamedTuple

import torch

READ_VERSIONS = ("2.11", "2.12", "2.13", "2.14")
RUN_VERSION = "2.14.1"

_SCHEDULES, _STAGE = "torch.distributed.pipelining.schedules", "torch.distributed.pipelining.stage"


class UnfitTorch(RuntimeError):
    """The installed torch is not one whose pipelining bpipe can use."""


class TorchName(NamedTuple):
    """A name of torch's: its module, and its first parameters that are given or read here.

    `use` says what for; it stands in the error where the name is missing.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    use: str


NAMES = (
    TorchName(_SCHEDULES, "get_schedule_class", ("schedule_name",), "torch's schedules by name"),
    TorchName(
        _SCHEDULES, "PipelineScheduleSingle", ("stage", "n_microbatches", "loss_fn"), "torch's schedules of one stage"
    ),
    TorchName(
        _SCHEDULES, "PipelineScheduleMulti", ("stages", "n_microbatches", "loss_fn"), "torch's schedules of several"
    ),
    TorchName(_SCHEDULES, "_PipelineScheduleRuntime", (), "the loop that runs a list of actions"),
    TorchName(
        _SCHEDULES,
        "_PipelineScheduleRuntime._prepare_schedule_with_comms",
        ("self", "actions"),
        "messages between computations",
    ),
    TorchName(
        _SCHEDULES,
        "_PipelineScheduleRuntime._step_microbatches",
        ("self", "arg_mbs", "kwarg_mbs", "target_mbs", "losses"),
        "one step",
    ),
    TorchName(
        _SCHEDULES, "_PipelineScheduleRuntime._initialize_stages", ("self", "args", "kwargs"), "the stages' handshake"
    ),
    TorchName(
        _SCHEDULES,
        "_PipelineScheduleRuntime._maybe_compute_loss",
        ("self", "stage", "output", "target_mbs", "mb_index"),
        "the end of a forward",
    ),
    TorchName(
        _SCHEDULES,
        "_Action",
        ("stage_index", "computation_type", "microbatch_index", "sub_actions"),
        "what a rank does",
    ),
    TorchName(_SCHEDULES, "_ComputationType", (), "kinds of actions"),
    TorchName(
        _SCHEDULES,
        "_check_torch_compile_compatibility",
        ("stages", "schedule_name"),
        "split backwards of compiled stages",
    ),
    TorchName(_STAGE, "_PipelineStageBase.forward_one_chunk", ("self", "fwd_chunk_id"), "the beginning of a forward"),
    TorchName(
        _STAGE,
        "_PipelineStageBase.backward_one_chunk",
        ("self", "bwd_chunk_id", "loss", "full_backward"),
        "the beginning and end of a backward",
    ),
    TorchName(
        _STAGE,
        "_PipelineStageBase.backward_weight_one_chunk",
        ("self", "bwd_chunk_id"),
        "the beginning and end of a wgrad",
    ),
)
KINDS = (
    *("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"),
    *("SEND_F", "SEND_B", "RECV_F", "RECV_B"),
)
# Attributes that are read of a schedule and of its stages, which only objects have. A test holds this to the code.
OF_SCHEDULE = (
    *("_has_backward", "_internal_losses", "_loss_fn", "_n_microbatches", "_num_stages", "_stages"),
    *("pipeline_order", "pipeline_order_with_comms", "pp_group_size", "rank", "scale_grads"),
    "stage_index_to_group_rank",
)
OF_STAGE = (
    *("args_recv_info", "backward_state", "clear_runtime_states", "device", "dw_builder", "fwd_cache"),
    *("grad_recv_info", "group", "group_rank", "group_size", "is_first", "is_last", "num_stages"),
    *("set_local_fwd_input", "stage_index", "submod"),
)


def lacking() -> list[str]:
    """Return what of the table the installed torch lacks: names, and parameters of those it has."""
    missing = []
    for module, name, parameters, use in NAMES:
        thing: Any = import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part, None)
        if thing is None:
            missing.append(f"{name} ({use})")
            continue
        known = inspect.signature(thing).parameters if parameters else {}
        missing += [f"{name}({parameter}) ({use})" for parameter in parameters if parameter not in known]
    kinds = getattr(import_module(_SCHEDULES), "_ComputationType", None)
    return missing + [f"_ComputationType.{kind}" for kind in KINDS if kinds is not None and not hasattr(kinds, kind)]


def _require(missing: list[str]) -> None:
    if missing:
        raise UnfitTorch(
            f"torch {torch.__version__} cannot be used by bpipe.torch: torch.distributed.pipelining has no "
            f"{', '.join(missing)}. Install one of torch {', '.join(READ_VERSIONS)} ({RUN_VERSION} is tested), or "
            "use its "
            f"own schedules"
        )


def require_attributes(schedule: object, stages: list[Any]) -> None:
    """Raise UnfitTorch where a schedule or one of its stages lacks an attribute that is read."""
    of_stages = [f"stage.{name}" for name in OF_STAGE if not all(hasattr(stage, name) for stage in stages)]
    _require([name for name in OF_SCHEDULE if not hasattr(schedule, name)] + of_stages)


_require(lacking())

_schedules: Any = import_module(_SCHEDULES)
Runtime: Any = _schedules._PipelineScheduleRuntime
SingleStage: Any = _schedules.PipelineScheduleSingle
TorchAction: Any = _schedules._Action
Computation: Any = _schedules._ComputationType
schedule_class: Any = _schedules.get_schedule_class
refuse_compiled: Any = _schedules._check_torch_compile_compatibility
