"""Run any training script of Megatron's with the hooks in.

    torchrun ... -m megatron.scheduling.launch pretrain_gpt.py <its flags> --bpipe ...

In: an unmodified script and its arguments. Out: the same script, whose argument parser knows our flags and whose
`pretrain` is balanced as they say. A script may also call `prepare()` itself, before it imports Megatron, and is then
launched as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bpipe import extras
from megatron.scheduling.hooks import upstream
from megatron.scheduling.start import exits, startup


def prepare() -> None:
    """Prepare this process: the CPU stand-in where there is no GPU, our flags, `pretrain` hooked.

    Call before importing Megatron.

    Repairs follow when the arguments are parsed, because a flag leaves them.
    """
    with _or_end():
        extras.require("megatron", "training")
    startup.prepare(repairing=False)
    from megatron.scheduling.hooks import patches

    with _or_end():
        wraps = {
            patches.PARSE_ARGS: _wrap_parse_args,
            patches.VALIDATE_ARGS: _wrap_validate_args,
            patches.PRETRAIN: _wrap_pretrain,
        }
        patches.install(wraps)


def require(args: Any, script: str) -> None:
    """End the program in one line where Megatron's arguments lack what a script of ours reads."""
    with _or_end():
        upstream.require(args, script)


def refuse_packed_batches(args: Any) -> None:
    """End the program where a pipeline would pass several packed rows at once.

    Megatron joins a micro-batch of them to one row before the first layer, and its stages receive it as so many
    rows of a row's length: of the same number of elements, in another order.
    """
    from bpipe.config.features.feature import Settings

    given = Settings(args)
    rows = max(given.micro_batch_size or 1, given.eval_micro_batch_size or 1)
    if rows == 1 or (given.pipeline_model_parallel_size or 1) == 1:
        return
    for name, wanted in (
        ("sft", given.sft),
        ("dataloader_inter_document_masking", given.dataloader_inter_document_masking),
    ):
        if wanted:
            exits.end(
                f"--{name.replace('_', '-')}: Megatron joins the {rows} packed rows of a micro-batch into one, but "
                f"its pipeline receives them as {rows}, in a different order; use --micro-batch-size 1 with a longer "
                "--seq-length"
            )


@contextlib.contextmanager
def _or_end() -> Iterator[None]:
    """What the user did, and a Megatron that cannot be used, end the program in one line from one rank."""
    try:
        yield
    except (ValueError, upstream.Unfit) as error:
        exits.end(error)


def _wrap_parse_args(parse_args: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse_args)
    def parse(extra_args_provider: Callable[[Any], Any] | None = None, ignore_unknown_args: bool = False) -> Any:
        from megatron.scheduling.options.flags import add_arguments

        def provider(parser: Any) -> Any:
            exits.refuse_once(parser)
            return add_arguments(extra_args_provider(parser) if extra_args_provider else parser)

        startup.complete_arguments()
        args = parse_args(provider, ignore_unknown_args)
        with _or_end():
            # A YAML configuration replaces the command line, and ours with it; it is refused later.
            startup.leave_unrepaired() if getattr(args, "bpipe_no_repairs", False) else startup.repair()
            startup.share_gpus(args)
        return args

    return parse


def _wrap_validate_args(validate_args: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(validate_args)
    def validated(args: Any, *defaults: Any, **named: Any) -> Any:
        from megatron.scheduling.options import derived_flags
        from megatron.scheduling.placement import rank_order as placement

        with _or_end():
            derived_flags.complete(args)
        result = validate_args(args, *defaults, **named)
        # Only now it is known which schedule this is, and so who is paired with whom; nobody has asked for a rank yet.
        with _or_end():
            placement.apply(args)
        return result

    return validated


def _wrap_pretrain(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(pretrain)

    @functools.wraps(pretrain)
    def run(*positional: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        with scheduling(get_args(), signature.bind(*positional, **keywords).arguments):
            result = pretrain(*positional, **keywords)
        # Only a run that ended well: after an error the other ranks are gone, and leaving their groups could wait for
        # them.
        atexit.register(_leave_process_groups)
        return result

    return run


def _leave_process_groups() -> None:
    """Megatron leaves its process groups to the interpreter's end, where a communication thread still running aborts
    the process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def scheduling(args: Any, given: Mapping[str, Any]) -> Iterator[None]:
    """Install what the arguments ask for. Without any of our flags Megatron's scheduler is not touched.

    `given`: what the script gives `pretrain`, by name.
    """
    from megatron.scheduling.options.arguments import config_from_args

    with _or_end():
        config = config_from_args(args)
    if config.audit is not None:
        with _audited(config.audit):
            yield
        return
    if not config.active:
        yield
        return
    if config.report is not None:
        exits.need_folder(config.report)
    upstream.say_absent(args, configuration=False)
    from bpipe.runtime.failures import Watch
    from megatron.scheduling.composing import compose
    from megatron.scheduling.placement.embedding_ranks import Refused, refuse_group

    with _or_end():
        refuse_group(config.positions, given.get("pg_collection"))
        composed = compose(config, args)
        installed = composed.install()
    reporter = composed.reporter
    watch = Watch()
    watch.begin()
    try:
        yield
        if reporter is not None:
            reporter.finish()
        installed.remove()
    except Refused as error:
        # Every rank sees it alike, and nobody has waited for anybody yet.
        _leave_process_groups()
        exits.end(error)
    except Exception as error:
        first = watch.failed(error)
        if reporter is not None and first is not None:
            reporter.failed(first)
        raise
    finally:
        watch.end()
        # Or the process ends, by an error or by one of Megatron's own exits, and gives everything back itself.
        installed.remove(failed=True)


@contextlib.contextmanager
def _audited(num_microbatches: int) -> Iterator[None]:
    # Not at the top: nobody else loads it.
    from megatron.scheduling.hooks.patches import install
    from megatron.scheduling.record.audit import StageAudit

    audit = StageAudit(num_microbatches)
    installed = install(audit.wraps())
    try:
        yield
        audit.finish()
    finally:
        installed.remove()


def main() -> None:
    """Run `python -m megatron.scheduling.launch SCRIPT [ARGUMENTS]`."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    script = Path(sys.argv[1]).resolve()
    if not script.is_file():
        sys.exit(f"bpipe: no training script at {script}")
    prepare()
    sys.argv = [str(script), *sys.argv[2:]]
    # As `python SCRIPT` does: what lies beside the script can be imported.
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
