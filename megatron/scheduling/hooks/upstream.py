"""The Megatron of this process, and what it lacks of what this project reads. Importing this module imports no Megatron."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpipe.config.features.table import FEATURES, PLACED, SHARDED, SLICED, Settings

TRIED_VERSIONS = ("0.19.2",)


class Unfit(RuntimeError):
    """The Megatron that runs is not one that bpipe can use."""


@dataclass(frozen=True)
class Running:
    """The megatron-core that was imported."""

    version: str
    """Its own version, maybe with the hash of a commit."""

    place: Path
    """Its folder."""

    @property
    def release(self) -> str:
        """The version without what a build or a checkout appended."""
        # Not at the top: it comes with megatron-core, without which the program ends in one line.
        from packaging.version import InvalidVersion, Version

        try:
            return Version(self.version).public
        except InvalidVersion:
            return self.version

    @property
    def tried(self) -> bool:
        return self.release in TRIED_VERSIONS


def running() -> Running:
    """Return the Megatron that Python finds first, which may be a checkout instead of the installed wheel."""
    # Not at the top: the CPU stand-in has to precede Megatron.
    from megatron import core

    return Running(str(core.__version__), Path(str(core.__file__)).resolve().parent)


def describe(megatron: Running) -> list[str]:
    """Return lines for the log: version, place, and whether it is a tested version."""
    lines = [f"megatron-core {megatron.version} from {megatron.place}"]
    if not megatron.tried:
        lines.append(
            f"megatron-core {megatron.release} is not among the tested versions ({', '.join(TRIED_VERSIONS)}); the "
            "functions that bpipe replaces have the expected parameters"
        )
    return lines


@functools.cache
def remark(line: str) -> None:
    """Print a line once, from rank 0; there may be no process group yet."""
    if os.environ.get("RANK", "0") == "0":
        print(f"bpipe: {line}", flush=True)


# Attributes of a model's configuration that an iteration reads.
_CONFIGURATION = """
    barrier_with_L1_time batch_p2p_sync calculate_per_token_loss finalize_model_grads_func grad_sync_func
    microbatch_group_size_per_vp_stage no_sync_func param_sync_func pipeline_dtype timers
""".split()


def require(config: object) -> None:
    """Raise Unfit if a model's configuration lacks what an iteration reads."""
    lacking = [name for name in _CONFIGURATION if not hasattr(config, name)]
    if lacking:
        raise unfit(f"bpipe's driver: its configuration has no {', '.join(lacking)}")


def unfit(reason: str) -> Unfit:
    """Return the error that the running Megatron cannot be used by something, and why."""
    megatron = running()
    return Unfit(
        f"megatron-core {megatron.version} at {megatron.place} cannot be used by {reason}. Install "
        f"megatron-core=={TRIED_VERSIONS[-1]}, or train without bpipe"
    )


class _Looking(Settings):
    """Settings that notes what is asked and missing."""

    def __init__(self, source: object) -> None:
        super().__init__(source)
        self.missing: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._source, name):
            self.missing.add(name)
        return super().__getattr__(name)


# 0.19.2 has these in one of the two only.
_NOT_IN_ARGUMENTS = set(
    """cpu_offloading cuda_graph_scope num_microbatches_with_partial_activation_checkpoints num_moe_experts
    variable_seq_lengths""".split()
)
_NOT_IN_CONFIGURATION = set(
    """bias_gelu_fusion bias_swiglu_fusion ckpt_format dataloader_inter_document_masking fake_process_group
    hybrid_layer_pattern inprocess_restart iterations_to_skip load non_persistent_ckpt_type num_experts perform_rl_step
    quick_geglu save seq_length sft swiglu
    untie_embeddings_and_output_weights use_megatron_fsdp use_torch_fsdp2 yaml_cfg""".split()
)


def absent(source: object, *, configuration: bool) -> list[str]:
    """Return the settings that decide whether a feature is supported, and that Megatron's arguments or a model's
    configuration lack."""
    settings = _Looking(source)
    for feature in (*FEATURES, *PLACED, *SHARDED, *SLICED):
        feature.applies(settings)
    elsewhere = _NOT_IN_CONFIGURATION if configuration else _NOT_IN_ARGUMENTS
    return sorted(name for name in settings.missing - elsewhere if not name.startswith("bpipe_"))


def say_absent(source: object, *, configuration: bool) -> None:
    """Print the settings that an untested version lacks: it may have renamed one, and the feature is then not seen."""
    megatron = running()
    names = [] if megatron.tried else absent(source, configuration=configuration)
    if names:
        remark(
            f"megatron-core {megatron.release} lacks these settings in its "
            f"{'model configuration' if configuration else 'arguments'}; bpipe takes them for unset: {', '.join(names)}"
        )
