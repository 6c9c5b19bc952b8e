"""Judge launches by Megatron's own parser and validation, and by the trainer's, without a GPU.

    python -m megatron.scheduling.start.validation

It reads, as JSON, the flags of each launch with its nodes and devices of each, or null, and writes the version of
Megatron and a judgement of each launch. `bpipe.config.launch.validation` starts it.

Only arguments are judged: no file is read except a schedule, and the training's machine is taken to have GPUs, unless the
launch names gloo, Transformer Engine and its environment variables. Beyond `validate_args` this asks the code that would
refuse later in a start: the tokenizer, the number of micro-batches, the process groups, the model's configuration, the
layers of each stage, its modules where they are Megatron's own, the optimizer and the first lines of the interleaved loop.
"""

import ast
import contextlib
import copy
import io
import json
import logging
import os
import re
import resource
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from bpipe.config.launch.megatron_settings import without
from bpipe.runtime.config import refuse_standstill
from bpipe.schedule.families.families import FAMILIES, default_family
from bpipe.schedule.program import Exchange
from bpipe.transport.connect import MeasuredLink
from megatron.scheduling import cpu
from megatron.scheduling.hooks import upstream
from megatron.scheduling.options.arguments import SchedulingConfig, config_from_args
from megatron.scheduling.options.flags import add_arguments, complete
from megatron.scheduling.record import one_stage
from megatron.scheduling.start import startup

# Errors by which Megatron refuses arguments. Any other is an error of this program or of the machine.
_REFUSALS = (AssertionError, ValueError, RuntimeError, NotImplementedError, KeyError, ZeroDivisionError)
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
# Arguments that have another name in a model's configuration.
_FIELDS = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
# Variables that Megatron requires with some flags: the training's own are unknown here.
_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_GRAPHS_USE_NODE_PRIORITY": "1",
    "NVTE_CPU_OFFLOAD_V1": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "",
}
_OF_FSDP = {"--use-megatron-fsdp", "--use-torch-fsdp2"}
# Newer than any version that Megatron asks for.
_TRANSFORMER_ENGINE = "99.0"
# Arguments that replace others by those of a file.
_ELSEWHERE = {"yaml_cfg", "use_checkpoint_args"}
_WITHOUT_FILES = "NullTokenizer"
_MOST_FLAGS = 5
_MOST_BYTES = 4 * 2**30


class _Refused(Exception):
    """Megatron refuses the launch; the message says why and names the flags."""


class _Accepted(Exception):
    """A function of Megatron's has come past its checks."""


def main() -> None:
    launches = json.load(sys.stdin)
    # A layout of 10^12 stages must not take the machine's memory.
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        prepare()
        judgements = [judge(flags, devices) for flags, devices in launches]
    print(json.dumps({"version": upstream.running().release, "judgements": judgements}))


def prepare() -> None:
    """Make this process ready to judge. Must be called before `megatron.core` is imported."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    cpu.install(torch.device("meta"))
    startup.prepare()
    _assume_transformer_engine()


def _assume_transformer_engine() -> None:
    """Let Megatron's checks find Transformer Engine if it is not installed; nothing of it runs."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    if utils.get_te_version().release != (0, 0, 0):
        return
    utils._te_version = utils.PkgVersion(_TRANSFORMER_ENGINE)
    for module in (rope_utils, moe_utils):
        for name, kernel in list(vars(module).items()):
            if name.startswith("fused_") and kernel is None:
                setattr(module, name, _Accepted)


def judge(flags: Sequence[str], devices: tuple[int, int] | None) -> dict[str, Any]:
    """Judge one launch.

    Args:
        flags: the flags of its script.
        devices: nodes and the devices of each; None for as few as it needs.

    Returns:
        `unknown`: flags that Megatron's parser does not have; `megatron`: why Megatron refuses the launch, or None;
        `trainer`: why this project's trainer refuses it, a line per reason; `unasked`: what could not be judged here
        and why, or None.
    """
    launch = _Launch(flags)
    answer: dict[str, Any] = {"unknown": launch.unknown, "megatron": None, "trainer": [], "unasked": None}
    with _environment(flags):
        try:
            answer["trainer"] = launch.judge(devices)
        except _Refused as refusal:
            answer["megatron"] = str(refusal)
        except Exception as error:
            answer["unasked"] = f"{type(error).__name__}: {_message(error)}"
    return answer


class _Launch:
    """A launch on its way through Megatron's start."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.flags = flags
        self.unknown: list[str] = []
        # By argument, the flag of Megatron's parser, and the words that were given.
        self._names: dict[str, str] = {}
        self._given: dict[str, str] = {}

    def _validated(self, devices: tuple[int, int] | None) -> Any:
        """Return the arguments as Megatron starts with them; raise _Refused where it would end instead."""
        from megatron.training import arguments

        sys.argv = ["pretrain_gpt.py", *self.flags]
        nodes, devices_per_node = devices or (1, 1)
        world_size, local_size = str(nodes * devices_per_node), str(devices_per_node)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=local_size)
        with self._refusing():
            args = arguments.parse_args(self._complete_parser)
        if devices is None:
            args.world_size = one_stage.ranks_of_a_stage(args) * args.pipeline_model_parallel_size
            os.environ["LOCAL_WORLD_SIZE"] = str(min(args.world_size, 8))
        # One process stands for all, and a budget of a device's own memory is that of another device.
        args.bpipe_placement = "none"
        startup.assume_device("cpu" if args.distributed_backend == "gloo" else "cuda")
        if args.bpipe_memory is not None and args.bpipe_memory.budget_bytes is None and not startup.is_cpu():
            args.bpipe_memory = args.bpipe_cluster = None
        complete(args)
        with self._refusing():
            arguments.validate_args(args, {})
        for check, *names in _CHECKS:
            with self._refusing(*names):
                check(args)
        return args

    def judge(self, devices: tuple[int, int] | None) -> list[str]:
        """Return why our trainer would end the launch, a line per reason; raise _Refused where Megatron would."""
        try:
            args = self._validated(devices)
            config = config_from_args(args)
        except ValueError as error:
            return [line.strip() for line in str(error).splitlines() if line != "this run cannot start:"]
        # The number of replicas says how many micro-batches there are, unless somebody says it.
        if config.own is None and (devices is not None or "global_batch_size" in self._given):
            with self._refusing("global_batch_size", "micro_batch_size", "pipeline_model_parallel_size"):
                _check_interleaved_loop(args)
        try:
            _check_transfers(args, config)
        except ValueError as error:
            return [str(error)]
        return []

    def _complete_parser(self, parser: Any) -> Any:
        """Add our flags, take out those that only the launch's script has, and let the parser raise its errors."""
        add_arguments(parser)
        known = parser._option_string_actions
        names = (word.partition("=")[0] for word in self.flags if word.startswith("--"))
        self.unknown += [name for name in names if name not in known]
        kept = without(self.unknown, self.flags)
        argument = ""
        for word in kept:
            if word.startswith("--"):
                argument = known[word.partition("=")[0]].dest
                self._given[argument] = word
            elif argument:
                self._given[argument] += f" {word}"
        if _ELSEWHERE & self._given.keys():
            raise OSError("its arguments are in a file that is not read here")
        self._names = {action.dest: flag for flag, action in reversed(known.items())}
        sys.argv[1:] = kept

        def error(message: str) -> NoReturn:
            raise _Refused(message)

        parser.error = error
        return parser

    @contextlib.contextmanager
    def _refusing(self, *names: str) -> Iterator[None]:
        """Raise _Refused for what Megatron refuses, with the flags of `names` and of the check that failed."""
        try:
            yield
        except Exception as error:
            # Megatron raises some of no kind.
            if not isinstance(error, _REFUSALS) and type(error) is not Exception:
                raise
            if _lacks_package(error):
                raise OSError(_message(error)) from error
            if isinstance(error, ZeroDivisionError):
                names = tuple(name for name, words in self._given.items() if words.endswith(" 0"))
            check, message = _failed_check(error), _message(error)
            flags = self._flags_in(f"{check} {message}", names)
            reason = message or check.split("\n")[0]
            raise _Refused(f"{reason}{f' ({flags})' if flags else ''}") from error
        except SystemExit:
            raise _Refused(f"it ends without a reason ({' '.join(self._given.values())[:100]})") from None

    def _flags_in(self, text: str, names: Sequence[str]) -> str:
        """Return the flags whose arguments are in a text, as they were given or, if none was, by their names."""
        flat = re.sub(r"\W+", "_", text).lower()
        for name, field in _FIELDS.items():
            flat = flat.replace(field, name)
        wanted = [*names, *(_SIZES if "world_size" in flat else ())]
        given = []
        for name in sorted(self._given, key=len, reverse=True):
            flat, times = re.subn(rf"(?<![a-z0-9]){name}(?![a-z0-9])", "", flat)
            given += [name] if times or name in wanted else []
        said = [words for name, words in self._given.items() if name in given]
        said += [
            self._names[name]
            for name in re.findall(r"args\.(\w+) is not None", text.split("\n")[0])
            if name in self._names
        ]
        if said:
            return ", ".join(said[:_MOST_FLAGS])
        longest_first = sorted((name for name in self._names if "_" in name), key=len, reverse=True)
        missing = re.findall(rf"(?<![a-z0-9])(?:{'|'.join(longest_first)})(?![a-z0-9])", flat)
        return ", ".join(self._names[name] for name in [*dict.fromkeys(missing)][:_MOST_FLAGS])


def _check_tokenizer(args: Any) -> None:
    """Let Megatron choose the tokenizer, and make the one that needs no file."""
    from megatron.core.tokenizers import megatron_tokenizer
    from megatron.training import global_vars

    if args.tokenizer_type == _WITHOUT_FILES and not args.vocab_size:
        raise ValueError(f"{args.tokenizer_type} needs vocab_size")
    if args.tokenizer_type == _WITHOUT_FILES:
        global_vars.build_tokenizer(args)
    elif args.tokenizer_type is not None:
        with _stopping_at(megatron_tokenizer, "_get_tokenizer_model_class"):
            global_vars.build_tokenizer(args)


def _check_microbatches(args: Any) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        rank=1,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size * args.gtp_weight_remat_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )


def _check_groups(args: Any) -> None:
    """Let Megatron check the sizes of all groups, and stop it before it makes the first."""
    from megatron.core import parallel_state

    with one_stage.fake_world(0, args.world_size), _stopping_at(parallel_state, "create_group"):
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            gtp_remat_size=args.gtp_weight_remat_size,
            expert_gtp_remat_size=args.expert_gtp_weight_remat_size,
            context_parallel_size=args.context_parallel_size,
            hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
            hybrid_context_parallel=args.hybrid_context_parallel,
            expert_model_parallel_size=args.expert_model_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        )


def _check_model(args: Any) -> None:
    """Let Megatron configure the model, and count the layers of all stages."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    if args.hybrid_layer_pattern is not None or config.pipeline_model_parallel_layout is not None:
        return
    chunks = config.virtual_pipeline_model_parallel_size
    layers = [
        get_num_layers_to_build(config, chunk, rank)
        for rank in range(config.pipeline_model_parallel_size)
        for chunk in ([None] if chunks is None else range(chunks))
    ]
    if sum(layers) != args.num_layers:
        raise ValueError(
            f"the stages have {sum(layers)} layers together, not num_layers: see decoder_first_pipeline_num_layers and "
            "decoder_last_pipeline_num_layers"
        )
    if args.num_attention_heads % (args.num_query_groups or 1):
        raise ValueError(
            f"num_attention_heads {args.num_attention_heads} must be a multiple of num_query_groups {args.num_query_groups}"
        )
    if args.num_experts is not None:
        _check_experts(args, config)


def _check_experts(args: Any, config: Any) -> None:
    """Let Megatron say which layers have experts. Raises ValueError for more experts of a token than there are."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

    if args.experimental_attention_variant is None:
        get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization=args.normalization)
    if args.moe_router_topk > args.num_experts:
        raise ValueError(f"moe_router_topk {args.moe_router_topk} must be at most num_experts {args.num_experts}")


def _check_modules(args: Any) -> None:
    """Let Megatron make the first and the last stage of its own modules: those of Transformer Engine need a GPU."""
    if args.transformer_impl != "local" or args.hybrid_layer_pattern is not None or args.padded_vocab_size is None:
        return
    own = copy.copy(args)
    own.world_size, own.data_parallel_size = one_stage.ranks_of_a_stage(args) * args.pipeline_model_parallel_size, 1
    own.perform_initialization = own.use_cpu_initialization = False
    for place in {0, args.pipeline_model_parallel_size - 1}:
        try:
            with one_stage.chunks(own, place):
                pass
        except TypeError as error:
            # A module that has no such argument.
            raise ValueError(str(error)) from error


def _check_optimizer(args: Any) -> None:
    """Let Megatron configure the optimizer and, if the training's length and rate are given, the scheduler of the rate."""
    from megatron.training import training

    training.get_megatron_ddp_config(args)
    try:
        training.get_megatron_optimizer_config(args)
    except RuntimeError as error:
        # Transformer Engine's.
        if not _lacks_package(error):
            raise
    if args.lr is None or (args.train_iters is None and args.train_samples is None):
        return
    own = copy.copy(args)
    with patch.object(training, "get_args", lambda: own):
        training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))


# In the order of a start, each with arguments that its refusals are about.
_CHECKS: tuple[tuple[Any, ...], ...] = (
    (_check_tokenizer, "tokenizer_type"),
    (_check_microbatches,),
    (_check_groups,),
    (_check_model,),
    (_check_modules,),
    (_check_optimizer, "lr_warmup_iters", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples", "train_iters"),
)


def _check_interleaved_loop(args: Any) -> None:
    """Let Megatron's interleaved loop check the number of micro-batches, and stop it before the first of them."""
    if args.virtual_pipeline_model_parallel_size is None or args.step_batch_size_schedule is not None:
        return
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    single = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    stages = SimpleNamespace(size=lambda: args.pipeline_model_parallel_size, rank=lambda: 0)
    chunks: list[Any] = [torch.nn.Module() for _ in range(config.virtual_pipeline_model_parallel_size)]
    for chunk in chunks:
        chunk.config, chunk.model_type = config, None
    with _stopping_at(schedules, "get_pp_rank_microbatches"):
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=None,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            p2p_communicator=SimpleNamespace(config=config, pp_group=stages),
            pg_collection=ProcessGroupCollection(tp=single, cp=single),
        )


def _check_transfers(args: Any, config: SchedulingConfig) -> None:
    """Raise ValueError if ranks could wait for each other because of transfers over NCCL, which the launch asks for."""
    if config.balance is None or config.transfers.transport != "nccl":
        return
    # Set here for Megatron; whether the training has it is unknown.
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    schedule = config.first_schedule()
    exchange = FAMILIES[default_family(config.num_chunks)].exchange if config.own is None else Exchange.POSTED
    links = [MeasuredLink((0, config.num_ranks - 1), "nccl", {})]
    refuse_standstill(schedule, exchange, config.transfers, torch.device("cuda"), links)


@contextlib.contextmanager
def _stopping_at(module: Any, name: str) -> Iterator[None]:
    """Leave the block once it calls this function of a module of Megatron's."""

    def stop(*_: object, **__: object) -> NoReturn:
        raise _Accepted

    with contextlib.suppress(_Accepted), patch.object(module, name, stop):
        yield


@contextlib.contextmanager
def _environment(flags: Sequence[str]) -> Iterator[None]:
    """Set the variables that these flags need, and afterwards all as they were: Megatron sets some itself."""
    with patch.dict(os.environ, _ENVIRONMENT):
        if _OF_FSDP & {*flags}:
            del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        yield


def _lacks_package(error: BaseException | None) -> bool:
    """Whether an error comes from a package that this machine does not have."""
    return error is not None and (
        isinstance(error, ImportError) or _lacks_package(error.__cause__ or error.__context__)
    )


def _message(error: BaseException) -> str:
    return " ".join(str(error).split())


def _failed_check(error: BaseException) -> str:
    """Return the conditions around the statement that raised an error, the innermost first, as they are in the source."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = frame.lineno or 0
    checks = [
        node
        for node in ast.walk(ast.parse(Path(frame.filename).read_text(encoding="utf-8")))
        if isinstance(node, (ast.Assert, ast.If)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return "\n".join(ast.unparse(node.test) for node in reversed(checks))


if __name__ == "__main__":
    main()
