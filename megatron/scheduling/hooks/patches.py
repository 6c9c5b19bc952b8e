"""The complete table of what is replaced in the installed Megatron, and of the signatures that were read when it was
written.

In: replacements by name. Out: an installed set that can be taken out again. A changed signature is refused before
anything is replaced. Nothing else in this project assigns to a name of Megatron's scheduler or trainer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.scheduling.hooks import upstream

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_LAYERS = "megatron.core.tensor_parallel.layers"


@dataclass(frozen=True)
class Patch:
    """One function of Megatron: where it is, the parameters it had in the version that was tried, and the modules that
    import its name.

    `name` may be that of a class's attribute, with a dot. A wrapper that `observes` hands on whatever it is given: of
    it only the parameters that are read stand here, and others do not matter. Further parameters of any other function
    have to have defaults: one that `hands_on` passes their values to Megatron, and any other is never given a value
    that is not the default. One that is `asked_by_scripts` is replaced in every module that has imported its name.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    bound_in: tuple[str, ...] = ()
    observes: bool = False
    hands_on: bool = False
    asked_by_scripts: bool = False


FORWARD_STEP = Patch(
    _SCHEDULES,
    "forward_step",
    (
        *(
            "forward_step_func",
            "data_iterator",
            "model",
            "num_microbatches",
            "input_tensor",
            "forward_data_store",
            "config",
        ),
        *("cp_group_size", "collect_non_loss_data", "checkpoint_activations_microbatch", "is_first_microbatch"),
        *("current_microbatch", "vp_stage", "is_last_stage"),
    ),
    hands_on=True,
)
BACKWARD_STEP = Patch(
    _SCHEDULES, "backward_step", ("input_tensor", "output_tensor", "output_tensor_grad", "config"), hands_on=True
)
CALCULATE_LOSS = Patch(
    _SCHEDULES,
    "forward_step_calc_loss",
    (
        *("model", "output_tensor", "loss_func", "config", "vp_stage", "collect_non_loss_data", "num_microbatches"),
        *("forward_data_store", "cp_group_size", "is_last_stage"),
    ),
    hands_on=True,
)
COMBINED_STEP = Patch(
    "megatron.core.pipeline_parallel.combined_1f1b",
    "combined_forward_backward_step",
    (
        *("forward_step_func", "data_iterator", "f_model", "num_microbatches", "input_tensor", "forward_data_store"),
        *("b_model", "b_input_tensor", "b_output_tensor", "b_output_tensor_grad", "config", "f_model_chunk_id"),
        *("pre_forward", "pre_backward", "post_forward", "post_backward", "collect_non_loss_data"),
        *("checkpoint_activations_microbatch", "is_first_microbatch", "current_microbatch", "encoder_decoder_xattn"),
        "fsdp_wrapper",
    ),
)
_LOOP = (
    *(
        "forward_step_func",
        "data_iterator",
        "model",
        "num_microbatches",
        "seq_length",
        "micro_batch_size",
        "decoder_seq_length",
    ),
    *("forward_only", "collect_non_loss_data", "first_val_step", "adjust_tensor_shapes_fn", "p2p_communicator"),
    *("pg_collection", "force_all_reduce"),
)
ONE_F_ONE_B = Patch(_SCHEDULES, "forward_backward_pipelining_without_interleaving", _LOOP, hands_on=True)
NO_PIPELINING = Patch(_SCHEDULES, "forward_backward_no_pipelining", _LOOP, hands_on=True)
INTERLEAVED = Patch(_SCHEDULES, "forward_backward_pipelining_with_interleaving", _LOOP, hands_on=True)
TRAIN_STEP = Patch("megatron.training.training", "train_step", ("model", "optimizer", "iteration"), observes=True)
# Megatron's main adds `output_dtype`, and `gtp_remat_size` is not in all of its branches. A layer whose call gives one of
# these another value than its default is not put off.
LINEAR = Patch(
    _LAYERS,
    "linear_with_grad_accumulation_and_async_allreduce",
    (
        *("input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel"),
        *("grad_output_buffer", "wgrad_deferral_limit", "tp_group"),
    ),
    bound_in=("megatron.core.tensor_parallel",),
    observes=True,
)
LINEAR_BACKWARD = Patch(_LAYERS, "LinearWithGradAccumulationAndAsyncCommunication.backward", ("ctx", "grad_output"))
CONFIGURED = Patch("megatron.core.transformer.transformer_config", "TransformerConfig.__post_init__", ("self",))
PARSE_ARGS = Patch("megatron.training.arguments", "parse_args", ("extra_args_provider", "ignore_unknown_args"))
PRETRAIN = Patch("megatron.training.training", "pretrain", (), bound_in=("megatron.training",), observes=True)
VALIDATE_ARGS = Patch("megatron.training.arguments", "validate_args", ("args", "defaults"))

# Where a placement is not Megatron's own: who is asked while a chunk is built, and what counts on where the first stage
# is.
_STATE = "megatron.core.parallel_state"
_CHECKPOINT = "megatron.core.dist_checkpointing"
PIPELINE_GROUP = Patch(_STATE, "get_pipeline_model_parallel_group", ("check_initialized",))
PIPELINE_RANK = Patch(_STATE, "get_pipeline_model_parallel_rank", ())
_STAGE = ("ignore_virtual", "vp_stage")
FIRST_STAGE = Patch(_STATE, "is_pipeline_first_stage", _STAGE, asked_by_scripts=True)
LAST_STAGE = Patch(_STATE, "is_pipeline_last_stage", _STAGE, asked_by_scripts=True)
EMBEDDING_RANKS = Patch(_STATE, "default_embedding_ranks", ("pp_ranks",))
INITIALIZE = Patch(
    _STATE, "initialize_model_parallel", ("get_embedding_ranks", "get_position_embedding_ranks"), observes=True
)
POSITION_EMBEDDING_RANKS = Patch(_STATE, "default_position_embedding_ranks", ("pp_ranks",))
BUILD_CHUNKS = Patch(
    "megatron.training.models.dist_utils",
    "build_virtual_pipeline_stages",
    ("build_model_func", "pg_collection", "vp_size", "model_type"),
    bound_in=("megatron.training.models",),
)
GET_MODEL = Patch(
    "megatron.training.training",
    "get_model",
    ("model_provider_func", "model_type", "wrap_with_ddp", "config", "pg_collection"),
    bound_in=("megatron.training",),
)
_LAYOUT = "megatron.core.transformer.pipeline_parallel_layer_layout"
GPT_MODEL = Patch("megatron.core.models.gpt.gpt_model", "GPTModel.__init__", ("self",), observes=True)
HYBRID_MODEL = Patch("megatron.core.models.hybrid.hybrid_model", "HybridModel.__init__", ("self",), observes=True)
SEGMENT = Patch(
    "megatron.core.models.hybrid.hybrid_layer_allocation",
    "select_pipeline_segment",
    ("main_pattern", "pp_group", "vp_stage"),
    observes=True,
)
LAYERS_BEFORE = Patch(
    _LAYOUT, "PipelineParallelLayerLayout.get_layer_offset", ("self", "layer_type", "vp_stage", "pp_rank")
)
LAYERS_TO_BUILD = Patch(
    _LAYOUT, "PipelineParallelLayerLayout.get_num_layers_to_build", ("self", "layer_type", "vp_stage", "pp_rank")
)
DATA_ITERATORS = Patch(
    "megatron.training.training", "build_train_valid_test_data_iterators", ("build_train_valid_test_datasets_provider",)
)
TIED_GRADIENTS = Patch(
    "megatron.core.distributed.finalize_model_grads",
    "_allreduce_word_embedding_grads",
    ("model", "config", "embd_group", "pp_group"),
)
SAVE = Patch(f"{_CHECKPOINT}.serialization", "save", ("sharded_state_dict",), bound_in=(_CHECKPOINT,), observes=True)
LOAD = Patch(f"{_CHECKPOINT}.serialization", "load", ("sharded_state_dict",), bound_in=(_CHECKPOINT,), observes=True)
CHECKPOINT_FORMAT = Patch("megatron.training.checkpointing", "_get_checkpoint_format", ("checkpoint_name", "args"))
_BY_BUFFER = ("self", "model_sharded_state_dict", "is_loading", "metadata")
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
STATE_BY_BUFFER = Patch(_OPTIMIZER, "DistributedOptimizer.sharded_param_state_dp_reshardable", _BY_BUFFER)
STATE_BY_RANK = Patch(_OPTIMIZER, "DistributedOptimizer.sharded_param_state_dp_zero", _BY_BUFFER)

# Where micro-batches are cut into slices: whose attention sees the keys of earlier ones, and whose positions begin
# where a slice does.
LOCAL_ATTENTION = Patch(
    "megatron.core.transformer.dot_product_attention",
    "DotProductAttention.forward",
    (*("self", "query", "key", "value", "attention_mask", "attn_mask_type"), "attention_bias", "packed_seq_params"),
)
CHECKPOINTED_ATTENTION = Patch(
    "megatron.core.transformer.attention",
    "Attention._checkpointed_attention_forward",
    (
        *("self", "query", "key", "value", "attention_mask", "rotary_pos_emb", "attn_mask_type", "attention_bias"),
        *("packed_seq_params", "core_attention_extra_kwargs"),
    ),
)
_POSITIONS = ("self", "max_seq_len", "offset", "packed_seq", "cp_group")
_EMBEDDINGS = "megatron.core.models.common.embeddings"
ROTARY = Patch(f"{_EMBEDDINGS}.rotary_pos_embedding", "RotaryEmbedding.forward", _POSITIONS)
YARN = Patch(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding", "YarnRotaryEmbedding.forward", _POSITIONS)
_ROUTER = "megatron.core.transformer.moe.router"
_OF_ROUTER = ("self", "probs", "scores_for_aux_loss", "routing_map")
AUX_LOSS = Patch(_ROUTER, "TopKRouter._apply_aux_loss", (*_OF_ROUTER, "with_padding_mask"))
SEQUENCE_AUX_LOSS = Patch(
    _ROUTER, "TopKRouter._apply_seq_aux_loss", (*_OF_ROUTER, "seq_length", "bsz", "with_padding_mask")
)
BALANCING_LOSS = Patch(
    _ROUTER,
    "switch_load_balancing_loss_func",
    (
        *("probs", "tokens_per_expert", "total_num_tokens", "topk", "num_experts", "moe_aux_loss_coeff"),
        "fused",
        "padding_mask",
    ),
)
Z_LOSS = Patch(_ROUTER, "z_loss_func", ("logits", "z_loss_coeff", "padding_mask"))
# Whose further tokens stand behind a slice's end.
_FURTHER = "megatron.core.transformer.multi_token_prediction"
ROLL = Patch(_FURTHER, "roll_tensor", ("tensor", "shifts", "dims", "cp_group", "packed_seq_params"), hands_on=True)
FURTHER_LOSSES = Patch(
    _FURTHER,
    "process_mtp_loss",
    (
        *("hidden_states", "labels", "loss_mask", "output_layer", "output_weight", "runtime_gather_output"),
        *("is_training", "compute_language_model_loss", "config", "cp_group", "tp_group", "packed_seq_params"),
        *("scale_logits_fn", "input_ids"),
    ),
    bound_in=("megatron.core.models.gpt.gpt_model", "megatron.core.models.hybrid.hybrid_model"),
)
ACCEPTED = Patch(
    _FURTHER,
    "_compute_mtp_acceptance_counts",
    ("mtp_logits", "mtp_labels", "loss_mask", "output_layer", "runtime_gather_output", "tp_group"),
)

PATCHES = (
    *(
        FORWARD_STEP,
        CALCULATE_LOSS,
        BACKWARD_STEP,
        COMBINED_STEP,
        ONE_F_ONE_B,
        INTERLEAVED,
        NO_PIPELINING,
        LINEAR,
        LINEAR_BACKWARD,
        CONFIGURED,
        TRAIN_STEP,
        PARSE_ARGS,
    ),
    *(
        PRETRAIN,
        VALIDATE_ARGS,
        PIPELINE_GROUP,
        PIPELINE_RANK,
        FIRST_STAGE,
        LAST_STAGE,
        INITIALIZE,
        EMBEDDING_RANKS,
        POSITION_EMBEDDING_RANKS,
        BUILD_CHUNKS,
        GET_MODEL,
        GPT_MODEL,
        HYBRID_MODEL,
    ),
    *(LOCAL_ATTENTION, CHECKPOINTED_ATTENTION, ROTARY, YARN, AUX_LOSS, SEQUENCE_AUX_LOSS, BALANCING_LOSS, Z_LOSS),
    *(ROLL, FURTHER_LOSSES, ACCEPTED),
    *(
        SEGMENT,
        LAYERS_BEFORE,
        LAYERS_TO_BUILD,
        DATA_ITERATORS,
        TIED_GRADIENTS,
        SAVE,
        LOAD,
        CHECKPOINT_FORMAT,
        STATE_BY_BUFFER,
        STATE_BY_RANK,
    ),
)
# What our own loop calls of what Megatron's loops call around their steps.
LEAVES = (
    FORWARD_STEP,
    BACKWARD_STEP,
    CALCULATE_LOSS,
    Patch(_SCHEDULES, "deallocate_output_tensor", ("out", "deallocate_pipeline_outputs"), hands_on=True),
    Patch(_SCHEDULES, "check_first_val_step", ("first_val_step", "forward_only", "cond"), hands_on=True),
    Patch(_SCHEDULES, "clear_embedding_activation_buffer", ("config", "model", "is_last_stage"), hands_on=True),
    Patch(
        _SCHEDULES,
        "finish_embedding_wgrad_compute",
        ("config", "embedding_module", "is_last_stage", "tp_group"),
        hands_on=True,
    ),
)

# A wrapper is made from the function it stands for.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
# The arguments by name, and what runs the function with them.
Look = Callable[[Mapping[str, Any], Callable[[], Any]], Any]


def by_name(look: Look) -> Wrap:
    """Return a wrapper of a function that has `look` run it, and tells it the arguments by name."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return look(signature.bind(*args, **kwargs).arguments, functools.partial(function, *args, **kwargs))

        return run

    return wrap


def around(others: Mapping[Patch, Wrap], patch: Patch, wrap: Wrap) -> dict[Patch, Wrap]:
    """Return the patch wrapped around whoever of the others wraps it, too."""
    inner = others.get(patch)
    return {patch: wrap if inner is None else lambda function: wrap(inner(function))}


class Installed:
    """Patches that are installed. `remove` puts every function back, then ends what `closing` was told of."""

    def __init__(self) -> None:
        # Whose attribute, its name, and what was there: a function, or what a class has instead of one.
        self._originals: list[tuple[object, str, Any]] = []
        self._closing: list[Callable[[bool], None]] = []

    def add(self, patch: Patch, wrap: Wrap) -> None:
        owner, name = _place(patch.module, patch.name)
        original = getattr(owner, name)
        replacement: Any = _of_known_parameters(patch, original, wrap(original))
        if isinstance(inspect.getattr_static(owner, name), staticmethod):
            replacement = staticmethod(replacement)
        for module in (patch.module, *patch.bound_in, *_importers(patch, original)):
            owner, name = _place(module, patch.name)
            self._originals.append((owner, name, inspect.getattr_static(owner, name)))
            setattr(owner, name, replacement)

    def closing(self, close: Callable[[bool], None]) -> None:
        """Call `close(failed)` when the patches have been taken out."""
        self._closing.append(close)

    def remove(self, *, failed: bool = False) -> None:
        """Put every function back, and give back what the training has on this rank and on others.

        After a training that ended well all ranks call it, because they free the memory that they lend to each other
        together. A second call does nothing.

        Args:
            failed: Whether the training failed. Then no rank is waited for, and that memory stays until the process
                ends. An iteration that failed need not be told.
        """
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)
        while self._closing:
            self._closing.pop()(failed)


def _place(module: str, name: str) -> tuple[Any, str]:
    """Whose attribute a name is, which may have dots, and which of its attributes.

    Raises AttributeError where there is no such owner.
    """
    *owners, last = name.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), last


def _importers(patch: Patch, function: object) -> list[str]:
    """Return other modules that have the function by its name, a script's among them, where scripts ask it."""
    if not patch.asked_by_scripts:
        return []
    known = (patch.module, *patch.bound_in)
    return [
        name
        for name, module in list(sys.modules.items())
        if name not in known and getattr(module, "__dict__", {}).get(patch.name) is function
    ]


def _of_known_parameters(patch: Patch, function: Callable[..., Any], replacement: Any) -> Any:
    """Return the replacement, which a call reaches with no parameter that is later than the patch.

    Such a call raises Unfit where it gives one a value other than its default: what that changes is not known here.
    """
    signature = inspect.signature(function)
    further = {name: one.default for name, one in signature.parameters.items() if is_further(one, patch)}
    if not further or patch.observes or patch.hands_on:
        return replacement

    @functools.wraps(replacement)
    def known(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        for name, default in further.items():
            value = call.arguments.pop(name, default)
            if value is not default and not (isinstance(value, type(default)) and value == default):
                raise upstream.Unfit(
                    f"{patch.name}: bpipe does not know its parameter {name}, which this Megatron sets: install "
                    f"megatron-core=={upstream.TRIED_VERSIONS[-1]}, or train without the feature that sets it"
                )
        return replacement(*call.args, **call.kwargs)

    return known


def install(wraps: Mapping[Patch, Wrap]) -> Installed:
    """Check every signature, then replace. Raises Unfit naming what differs, with nothing replaced.

    Rank 0 says, once, which Megatron this is. Equal signatures in a version that was never tried are taken, and that is
    said too.
    """
    found = upstream.running()
    problems = [problem for patch in wraps for problem in differences(patch)]
    if problems:
        raise upstream.Unfit(
            f"megatron-core {found.version} at {found.place} is not the one bpipe was written against "
            f"({', '.join(upstream.TRIED_VERSIONS)}):\n  "
            + "\n  ".join(problems)
            + f"\nInstall megatron-core=={upstream.TRIED_VERSIONS[-1]}, or train without --bpipe"
        )
    for line in upstream.describe(found):
        upstream.remark(line)
    installed = Installed()
    for patch, wrap in wraps.items():
        installed.add(patch, wrap)
    return installed


def is_further(parameter: inspect.Parameter, patch: Patch) -> bool:
    """Return whether a parameter was not there when the patch was written, and a call may leave it out."""
    return parameter.name not in patch.parameters and parameter.default is not inspect.Parameter.empty


def differences(patch: Patch) -> list[str]:
    """Return what differs from what was read: a missing function, new parameters, missing ones.

    Empty where nothing does.
    """
    where = f"{patch.module}.{patch.name}"
    try:
        owner, name = _place(patch.module, patch.name)
        function = getattr(owner, name)
    except AttributeError:
        return [f"{where} is missing"]
    signature = inspect.signature(function).parameters
    found = tuple(name for name in signature if patch.observes or not is_further(signature[name], patch))
    if found == patch.parameters:
        return []
    new = [name for name in found if name not in patch.parameters and not patch.observes]
    missing = [name for name in patch.parameters if name not in found]
    if patch.observes and not missing:
        return []
    what = [f"new parameters {', '.join(new)}"] * bool(new) + [f"missing parameters {', '.join(missing)}"] * bool(
        missing
    )
    return [f"{where}: {' and '.join(what) or 'parameters in a different order'}"]
