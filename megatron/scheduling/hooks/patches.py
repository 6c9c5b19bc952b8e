"""Table of the functions of Megatron that are replaced, with the parameters they had in the tested version.

A changed signature is refused before anything is replaced, and everything can be put back. No other module of this
project assigns to a name of Megatron's scheduler or trainer.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.scheduling.hooks import upstream


@dataclass(frozen=True)
class Patch:
    """One function of Megatron.

    Parameters that a later Megatron adds must have defaults. Unless the patch `observes` or `hands_on`, a call that
    gives one of them another value is refused.

    Attributes:
        name: May be an attribute of a class, with a dot.
        parameters: Parameters in the tested version; of a function that is only observed, those that are read.
        bound_in: Other modules of Megatron that import the name.
        observes: Whether the wrapper passes on whatever it is given, so that other parameters do not matter.
        hands_on: Whether the wrapper passes values of later parameters on to Megatron.
        asked_by_scripts: Whether the function is replaced in every module that has imported its name.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    bound_in: tuple[str, ...] = ()
    observes: bool = False
    hands_on: bool = False
    asked_by_scripts: bool = False


def patch(module: str, name: str, parameters: str = "", **options: Any) -> Patch:
    """Return the patch of a function whose parameters are given as one text."""
    return Patch(module, name, tuple(parameters.split()), **options)


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
FORWARD_STEP = patch(
    _SCHEDULES,
    "forward_step",
    """forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config cp_group_size
    collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch current_microbatch vp_stage
    is_last_stage""",
    hands_on=True,
)
BACKWARD_STEP = patch(
    _SCHEDULES, "backward_step", "input_tensor output_tensor output_tensor_grad config", hands_on=True
)
CALCULATE_LOSS = patch(
    _SCHEDULES,
    "forward_step_calc_loss",
    """model output_tensor loss_func config vp_stage collect_non_loss_data num_microbatches forward_data_store
    cp_group_size is_last_stage""",
    hands_on=True,
)
COMBINED_STEP = patch(
    "megatron.core.pipeline_parallel.combined_1f1b",
    "combined_forward_backward_step",
    """forward_step_func data_iterator f_model num_microbatches input_tensor forward_data_store b_model b_input_tensor
    b_output_tensor b_output_tensor_grad config f_model_chunk_id pre_forward pre_backward post_forward post_backward
    collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch current_microbatch
    encoder_decoder_xattn fsdp_wrapper""",
)
_LOOP = """forward_step_func data_iterator model num_microbatches seq_length micro_batch_size decoder_seq_length
    forward_only collect_non_loss_data first_val_step adjust_tensor_shapes_fn p2p_communicator pg_collection
    force_all_reduce"""
ONE_F_ONE_B = patch(_SCHEDULES, "forward_backward_pipelining_without_interleaving", _LOOP, hands_on=True)
NO_PIPELINING = patch(_SCHEDULES, "forward_backward_no_pipelining", _LOOP, hands_on=True)
INTERLEAVED = patch(_SCHEDULES, "forward_backward_pipelining_with_interleaving", _LOOP, hands_on=True)
# Our own loop calls these, as Megatron's loops do around their steps.
LEAVES = (
    FORWARD_STEP,
    BACKWARD_STEP,
    CALCULATE_LOSS,
    patch(_SCHEDULES, "deallocate_output_tensor", "out deallocate_pipeline_outputs", hands_on=True),
    patch(_SCHEDULES, "check_first_val_step", "first_val_step forward_only cond", hands_on=True),
    patch(_SCHEDULES, "clear_embedding_activation_buffer", "config model is_last_stage", hands_on=True),
    patch(
        _SCHEDULES, "finish_embedding_wgrad_compute", "config embedding_module is_last_stage tp_group", hands_on=True
    ),
)
_LAYERS = "megatron.core.tensor_parallel.layers"
# Megatron's main adds `output_dtype`, and only some of its branches have `gtp_remat_size`. A layer that is called with
# another value than the default of such a parameter is not split.
LINEAR = patch(
    _LAYERS,
    "linear_with_grad_accumulation_and_async_allreduce",
    """input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel grad_output_buffer
    wgrad_deferral_limit tp_group""",
    bound_in=("megatron.core.tensor_parallel",),
    observes=True,
)
LINEAR_BACKWARD = patch(_LAYERS, "LinearWithGradAccumulationAndAsyncCommunication.backward", "ctx grad_output")
CONFIGURED = patch("megatron.core.transformer.transformer_config", "TransformerConfig.__post_init__", "self")

_TRAINING, _ARGUMENTS = "megatron.training.training", "megatron.training.arguments"
TRAIN_STEP = patch(_TRAINING, "train_step", "model optimizer iteration", observes=True)
# What captures an iteration into a CUDA graph and replays it.
GRAPHED = patch("megatron.core.full_cuda_graph", "FullCudaGraphWrapper.__call__", "self", observes=True)
PARSE_ARGS = patch(_ARGUMENTS, "parse_args", "extra_args_provider ignore_unknown_args")
PRETRAIN = patch(_TRAINING, "pretrain", bound_in=("megatron.training",), observes=True)
VALIDATE_ARGS = patch(_ARGUMENTS, "validate_args", "args defaults")

# For a placement other than Megatron's: questions that are asked while a chunk is built, and code that relies on where
# the first stage is.
_STATE = "megatron.core.parallel_state"
_STAGE = "ignore_virtual vp_stage"
PIPELINE_GROUP = patch(_STATE, "get_pipeline_model_parallel_group", "check_initialized")
PIPELINE_RANK = patch(_STATE, "get_pipeline_model_parallel_rank")
FIRST_STAGE = patch(_STATE, "is_pipeline_first_stage", _STAGE, asked_by_scripts=True)
LAST_STAGE = patch(_STATE, "is_pipeline_last_stage", _STAGE, asked_by_scripts=True)
EMBEDDING_RANKS = patch(_STATE, "default_embedding_ranks", "pp_ranks")
POSITION_EMBEDDING_RANKS = patch(_STATE, "default_position_embedding_ranks", "pp_ranks")
INITIALIZE = patch(
    _STATE, "initialize_model_parallel", "get_embedding_ranks get_position_embedding_ranks", observes=True
)
BUILD_CHUNKS = patch(
    "megatron.training.models.dist_utils",
    "build_virtual_pipeline_stages",
    "build_model_func pg_collection vp_size model_type",
    bound_in=("megatron.training.models",),
)
GET_MODEL = patch(
    _TRAINING,
    "get_model",
    "model_provider_func model_type wrap_with_ddp config pg_collection",
    bound_in=("megatron.training",),
)
GPT_MODEL = patch("megatron.core.models.gpt.gpt_model", "GPTModel.__init__", "self", observes=True)
_HYBRID = "megatron.core.models.hybrid"
HYBRID_MODEL = patch(f"{_HYBRID}.hybrid_model", "HybridModel.__init__", "self", observes=True)
SEGMENT = patch(
    f"{_HYBRID}.hybrid_layer_allocation",
    "select_pipeline_segment",
    "main_pattern pp_group vp_stage",
    observes=True,
)
_LAYOUT = "megatron.core.transformer.pipeline_parallel_layer_layout"
_OF_LAYOUT = "self layer_type vp_stage pp_rank"
LAYERS_BEFORE = patch(_LAYOUT, "PipelineParallelLayerLayout.get_layer_offset", _OF_LAYOUT)
LAYERS_TO_BUILD = patch(_LAYOUT, "PipelineParallelLayerLayout.get_num_layers_to_build", _OF_LAYOUT)
DATA_ITERATORS = patch(_TRAINING, "build_train_valid_test_data_iterators", "build_train_valid_test_datasets_provider")
TIED_GRADIENTS = patch(
    "megatron.core.distributed.finalize_model_grads",
    "_allreduce_word_embedding_grads",
    "model config embd_group pp_group",
)
_CHECKPOINT = "megatron.core.dist_checkpointing"
SAVE = patch(f"{_CHECKPOINT}.serialization", "save", "sharded_state_dict", bound_in=(_CHECKPOINT,), observes=True)
LOAD = patch(f"{_CHECKPOINT}.serialization", "load", "sharded_state_dict", bound_in=(_CHECKPOINT,), observes=True)
CHECKPOINT_FORMAT = patch("megatron.training.checkpointing", "_get_checkpoint_format", "checkpoint_name args")
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_BY_BUFFER = "self model_sharded_state_dict is_loading metadata"
STATE_BY_BUFFER = patch(_OPTIMIZER, "DistributedOptimizer.sharded_param_state_dp_reshardable", _BY_BUFFER)
STATE_BY_RANK = patch(_OPTIMIZER, "DistributedOptimizer.sharded_param_state_dp_zero", _BY_BUFFER)

# For slices: attention that sees the keys of earlier slices, positions that begin where the slice does, losses of
# routers, and tokens after the end of a slice.
LOCAL_ATTENTION = patch(
    "megatron.core.transformer.dot_product_attention",
    "DotProductAttention.forward",
    "self query key value attention_mask attn_mask_type attention_bias packed_seq_params",
)
CHECKPOINTED_ATTENTION = patch(
    "megatron.core.transformer.attention",
    "Attention._checkpointed_attention_forward",
    """self query key value attention_mask rotary_pos_emb attn_mask_type attention_bias packed_seq_params
    core_attention_extra_kwargs""",
)
_EMBEDDINGS = "megatron.core.models.common.embeddings"
_POSITIONS = "self max_seq_len offset packed_seq cp_group"
ROTARY = patch(f"{_EMBEDDINGS}.rotary_pos_embedding", "RotaryEmbedding.forward", _POSITIONS)
YARN = patch(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding", "YarnRotaryEmbedding.forward", _POSITIONS)
_ROUTER = "megatron.core.transformer.moe.router"
_OF_ROUTER = "self probs scores_for_aux_loss routing_map"
AUX_LOSS = patch(_ROUTER, "TopKRouter._apply_aux_loss", f"{_OF_ROUTER} with_padding_mask")
SEQUENCE_AUX_LOSS = patch(_ROUTER, "TopKRouter._apply_seq_aux_loss", f"{_OF_ROUTER} seq_length bsz with_padding_mask")
BALANCING_LOSS = patch(
    _ROUTER,
    "switch_load_balancing_loss_func",
    "probs tokens_per_expert total_num_tokens topk num_experts moe_aux_loss_coeff fused padding_mask",
)
Z_LOSS = patch(_ROUTER, "z_loss_func", "logits z_loss_coeff padding_mask")
_FURTHER = "megatron.core.transformer.multi_token_prediction"
ROLL = patch(_FURTHER, "roll_tensor", "tensor shifts dims cp_group packed_seq_params", hands_on=True)
FURTHER_LOSSES = patch(
    _FURTHER,
    "process_mtp_loss",
    """hidden_states labels loss_mask output_layer output_weight runtime_gather_output is_training
    compute_language_model_loss config cp_group tp_group packed_seq_params scale_logits_fn input_ids""",
    bound_in=("megatron.core.models.gpt.gpt_model", "megatron.core.models.hybrid.hybrid_model"),
)
ACCEPTED = patch(
    _FURTHER,
    "_compute_mtp_acceptance_counts",
    "mtp_logits mtp_labels loss_mask output_layer runtime_gather_output tp_group",
)

# Makes a wrapper from the function that it replaces.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def replaced_by(call: Callable[..., Any]) -> Wrap:
    """Return a wrapper that runs `call` instead: it gets the function, and then the function's arguments."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return call(function, *args, **kwargs)

        return run

    return wrap


def by_name(call: Callable[[Mapping[str, Any], Callable[[], Any]], Any]) -> Wrap:
    """Return a wrapper that runs `call` instead: it gets the arguments by name, and what runs the function with
    them."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return call(signature.bind(*args, **kwargs).arguments, functools.partial(function, *args, **kwargs))

        return run

    return wrap


class Installed:
    """Patches that are installed."""

    def __init__(self) -> None:
        # Owner, name and original of each attribute. A class may have more than the function, such as a static method.
        self._originals: list[tuple[object, str, Any]] = []
        self._closing: list[Callable[[bool], None]] = []

    def add(self, patch: Patch, wrap: Wrap) -> None:
        owner, name = _owner_of(patch.module, patch.name)
        original = getattr(owner, name)
        replacement: Any = _of_known_parameters(patch, original, wrap(original))
        if isinstance(inspect.getattr_static(owner, name), staticmethod):
            replacement = staticmethod(replacement)
        modules = dict.fromkeys((patch.module, *patch.bound_in))
        if patch.asked_by_scripts:
            # Also in scripts and other modules that have imported it.
            loaded = list(sys.modules.items())
            modules |= {
                name: None for name, module in loaded if getattr(module, "__dict__", {}).get(patch.name) is original
            }
        for module in modules:
            owner, name = _owner_of(module, patch.name)
            self._originals.append((owner, name, inspect.getattr_static(owner, name)))
            setattr(owner, name, replacement)

    def closing(self, close: Callable[[bool], None]) -> None:
        """Call `close(failed)` when the patches have been removed."""
        self._closing.append(close)

    def remove(self, *, failed: bool = False) -> None:
        """Put every function back, and free the memory that the training has on this rank and on others.

        After a training that ended well all ranks call it, because they free the memory that they lend to each other
        together. A second call does nothing.

        Args:
            failed: Whether the training failed. Then no rank is waited for, and that memory stays until the process
                ends. An iteration that failed need not be reported.
        """
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)
        while self._closing:
            self._closing.pop()(failed)


def _owner_of(module: str, name: str) -> tuple[Any, str]:
    """Return the owner of a name, which may have dots, and the last part of the name."""
    *owners, last = name.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), last


def _of_known_parameters(patch: Patch, function: Callable[..., Any], replacement: Any) -> Any:
    """Return the replacement without parameters that are later than the patch.

    A call that gives one a value other than its default raises Unfit: its effect is not known here.
    """
    signature = inspect.signature(function)
    later = {
        name: parameter.default for name, parameter in signature.parameters.items() if is_further(parameter, patch)
    }
    if not later or patch.observes or patch.hands_on:
        return replacement

    @functools.wraps(replacement)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        for name, default in later.items():
            value = call.arguments.pop(name, default)
            if value is not default and not (isinstance(value, type(default)) and value == default):
                raise upstream.Unfit(
                    f"{patch.name}: bpipe does not know its parameter {name}, which this Megatron sets: install "
                    f"megatron-core=={upstream.TRIED_VERSIONS[-1]}, or train without the feature that sets it"
                )
        return replacement(*call.args, **call.kwargs)

    return run


def install(wraps: Mapping[Patch, Wrap]) -> Installed:
    """Check every signature, then replace the functions.

    Rank 0 prints once which Megatron runs. Equal signatures in a version that was never tested are accepted, which is
    printed too.

    Args:
        wraps: What replaces each function, by the patch that names it.

    Returns:
        What was replaced, which its `remove` puts back.

    Raises:
        Unfit: A signature differs; nothing has been replaced then.
    """
    megatron = upstream.running()
    problems = [problem for patch in wraps for problem in differences(patch)]
    if problems:
        raise upstream.Unfit(
            f"megatron-core {megatron.version} at {megatron.place} is not the one bpipe was written against "
            f"({', '.join(upstream.TRIED_VERSIONS)}):\n  "
            + "\n  ".join(problems)
            + f"\nInstall megatron-core=={upstream.TRIED_VERSIONS[-1]}, or train without --bpipe"
        )
    for line in upstream.describe(megatron):
        upstream.remark(line)
    installed = Installed()
    for patch, wrap in wraps.items():
        installed.add(patch, wrap)
    return installed


def is_further(parameter: inspect.Parameter, patch: Patch) -> bool:
    """Whether a parameter is later than the patch, and a call may leave it out."""
    return parameter.name not in patch.parameters and parameter.default is not inspect.Parameter.empty


def differences(patch: Patch) -> list[str]:
    """Return how the running Megatron differs from a patch: a missing function, new or missing parameters."""
    where = f"{patch.module}.{patch.name}"
    try:
        owner, name = _owner_of(patch.module, patch.name)
        signature = inspect.signature(getattr(owner, name)).parameters
    except AttributeError:
        return [f"{where} is missing"]
    names = tuple(name for name in signature if patch.observes or not is_further(signature[name], patch))
    new = [name for name in names if name not in patch.parameters and not patch.observes]
    missing = [name for name in patch.parameters if name not in names]
    if names == patch.parameters or (patch.observes and not missing):
        return []
    problems = [
        f"{kind} parameters {', '.join(listed)}" for kind, listed in (("new", new), ("missing", missing)) if listed
    ]
    return [f"{where}: {' and '.join(problems) or 'parameters in a different order'}"]
