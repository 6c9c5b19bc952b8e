"""The complete table of what is replaced in the installed Megatron, and of the signatures that were read when it was written.

In: replacements by name. Out: an installed set that can be taken out again. A changed signature is refused before anything is replaced.
Nothing else in this project assigns to a name of Megatron's scheduler or trainer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from packaging.version import Version

TRIED_VERSIONS = ("0.19.2",)

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


@dataclass(frozen=True)
class Patch:
    """One function of Megatron: where it is, the parameters it had in the version that was tried, and the modules that import its name."""

    module: str
    name: str
    parameters: tuple[str, ...]
    bound_in: tuple[str, ...] = ()


FORWARD_STEP = Patch(
    _SCHEDULES,
    "forward_step",
    (
        *("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store", "config"),
        *("cp_group_size", "collect_non_loss_data", "checkpoint_activations_microbatch", "is_first_microbatch"),
        *("current_microbatch", "vp_stage", "is_last_stage"),
    ),
)
BACKWARD_STEP = Patch(_SCHEDULES, "backward_step", ("input_tensor", "output_tensor", "output_tensor_grad", "config"))
_LOOP = (
    *("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size", "decoder_seq_length"),
    *("forward_only", "collect_non_loss_data", "first_val_step", "adjust_tensor_shapes_fn", "p2p_communicator"),
    *("pg_collection", "force_all_reduce"),
)
ONE_F_ONE_B = Patch(_SCHEDULES, "forward_backward_pipelining_without_interleaving", _LOOP)
INTERLEAVED = Patch(_SCHEDULES, "forward_backward_pipelining_with_interleaving", _LOOP)
TRAIN_STEP = Patch(
    "megatron.training.training",
    "train_step",
    (
        *("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config", "forward_backward_func"),
        *("iteration", "pg_collection", "p2p_communicator"),
    ),
)
PARSE_ARGS = Patch("megatron.training.arguments", "parse_args", ("extra_args_provider", "ignore_unknown_args"))
PRETRAIN = Patch(
    "megatron.training.training",
    "pretrain",
    (
        *("cfg_container", "train_valid_test_dataset_provider", "model_type", "forward_step_func", "model_provider"),
        *("process_non_loss_data_func", "get_embedding_ranks", "get_position_embedding_ranks", "non_loss_data_func", "store"),
        *("inprocess_call_wrapper", "p2p_communicator", "pg_collection", "skip_model_parallel_init"),
    ),
    bound_in=("megatron.training",),
)
PATCHES = (FORWARD_STEP, BACKWARD_STEP, ONE_F_ONE_B, INTERLEAVED, TRAIN_STEP, PARSE_ARGS, PRETRAIN)

# A wrapper is made from the function it stands for.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Installed:
    """Patches that are in. `remove` puts every function back, then ends what `closing` was told of."""

    def __init__(self) -> None:
        self._originals: list[tuple[ModuleType, str, Callable[..., Any]]] = []
        self._closing: list[Callable[[], None]] = []

    def add(self, patch: Patch, wrap: Wrap) -> None:
        original = getattr(importlib.import_module(patch.module), patch.name)
        replacement = wrap(original)
        for name in (patch.module, *patch.bound_in):
            module = importlib.import_module(name)
            self._originals.append((module, patch.name, original))
            setattr(module, patch.name, replacement)

    def closing(self, close: Callable[[], None]) -> None:
        """Call this when the patches have been taken out."""
        self._closing.append(close)

    def remove(self) -> None:
        while self._originals:
            module, name, original = self._originals.pop()
            setattr(module, name, original)
        while self._closing:
            self._closing.pop()()


def install(wraps: Mapping[Patch, Wrap]) -> Installed:
    """Check every signature, then replace. Raises RuntimeError naming what differs, with nothing replaced.

    Equal signatures in a version that was never tried are taken, and rank 0 says so, once.
    """
    tried, installed_version = ", ".join(TRIED_VERSIONS), Version(metadata.version("megatron-core")).public
    problems = [problem for patch in wraps for problem in differences(patch)]
    if problems:
        raise RuntimeError(
            f"the installed megatron-core {installed_version} is not the one bpipe was written against ({tried}):\n  "
            + "\n  ".join(problems)
            + f"\nInstall megatron-core=={TRIED_VERSIONS[-1]}, or train without --bpipe"
        )
    if installed_version not in TRIED_VERSIONS:
        _remark(
            f"megatron-core {installed_version} is not among the versions tried ({tried}); the signatures of what is replaced are equal"
        )
    installed = Installed()
    for patch, wrap in wraps.items():
        installed.add(patch, wrap)
    return installed


@functools.cache
def _remark(line: str) -> None:
    """One line, once, from rank 0; there may be no process group yet to ask."""
    if os.environ.get("RANK", "0") == "0":
        print(f"bpipe: {line}", flush=True)


def differences(patch: Patch) -> list[str]:
    """What is not as it was read: a missing function, new parameters, missing ones. Empty where all is well."""
    where = f"{patch.module}.{patch.name}"
    function = getattr(importlib.import_module(patch.module), patch.name, None)
    if function is None:
        return [f"{where} is gone"]
    found = tuple(inspect.signature(function).parameters)
    if found == patch.parameters:
        return []
    new = [name for name in found if name not in patch.parameters]
    missing = [name for name in patch.parameters if name not in found]
    what = [f"new parameters {', '.join(new)}"] * bool(new) + [f"missing parameters {', '.join(missing)}"] * bool(missing)
    return [f"{where}: {' and '.join(what) or 'parameters in another order'}"]
