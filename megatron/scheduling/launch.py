"""Run any training script of Megatron's with the hooks.

    torchrun ... -m megatron.scheduling.launch pretrain_gpt.py <its flags> --bpipe ...

The script's parser then has our flags, and its `pretrain` runs as they say. A script may also call `prepare()` itself,
before it imports Megatron, and is then launched as usual.
"""

import argparse
import atexit
import contextlib
import difflib
import os
import re
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from bpipe import extras
from megatron.scheduling.hooks import upstream
from megatron.scheduling.start import startup


def prepare() -> None:
    """Prepare this process: the CPU stand-in if there is no GPU, repairs, our flags, and the hook of `pretrain`.

    Call before importing Megatron.
    """
    with _or_end():
        extras.require("megatron", "training")
    startup.prepare()
    from megatron.scheduling.hooks import patches

    with _or_end():
        patches.install(
            {
                patches.PARSE_ARGS: patches.replaced_by(_parse),
                patches.VALIDATE_ARGS: patches.replaced_by(_validate),
                patches.PRETRAIN: patches.by_name(_pretrain),
            }
        )


def refuse_packed_batches(args: Any) -> None:
    """End the program if a pipeline would pass several packed rows at once.

    Megatron joins the rows of a micro-batch to one before the first layer, but its stages receive several rows: the same
    number of elements in another order.
    """
    from bpipe.config.features.table import Settings

    settings = Settings(args)
    rows = max(settings.micro_batch_size or 1, settings.eval_micro_batch_size or 1)
    if rows == 1 or (settings.pipeline_model_parallel_size or 1) == 1:
        return
    for flag, is_set in (
        ("--sft", settings.sft),
        ("--dataloader-inter-document-masking", settings.dataloader_inter_document_masking),
    ):
        if is_set:
            end(
                f"{flag}: Megatron joins the {rows} packed rows of a micro-batch into one, but "
                f"its pipeline receives them as {rows}, in a different order; use --micro-batch-size 1 with a longer "
                "--seq-length"
            )


@contextlib.contextmanager
def _or_end() -> Iterator[None]:
    """End the program, in one line from one rank, for a mistake of the user's or a Megatron that cannot be used."""
    try:
        yield
    except (ValueError, upstream.Unfit) as error:
        end(error)
    except AttributeError as error:
        # Any other would be a mistake of ours.
        if not isinstance(error.obj, argparse.Namespace):
            raise
        end(upstream.unfit(f"bpipe: its arguments have no {error.name}"))


def _parse(
    parse_args: Callable[..., Any],
    extra_args_provider: Callable[[Any], Any] | None = None,
    ignore_unknown_args: bool = False,
) -> Any:
    from megatron.scheduling.options.flags import add_arguments

    def provider(parser: Any) -> Any:
        refuse_once(parser)
        return add_arguments(extra_args_provider(parser) if extra_args_provider else parser)

    startup.complete_arguments()
    args = parse_args(provider, ignore_unknown_args)
    with _or_end():
        startup.share_gpus(args)
    return args


def _validate(validate_args: Callable[..., Any], args: Any, *defaults: Any, **named: Any) -> Any:
    from megatron.scheduling.options import flags
    from megatron.scheduling.placement import rank_order

    with _or_end():
        flags.complete(args)
    result = validate_args(args, *defaults, **named)
    # Now the schedule and its pairs are known, and nothing has read a rank yet.
    with _or_end():
        rank_order.apply(args)
    return result


def _pretrain(arguments: Mapping[str, Any], pretrain: Callable[[], Any]) -> Any:
    from megatron.training import get_args

    with scheduling(get_args(), arguments):
        result = pretrain()
    # Not after an error: the other ranks are gone, and leaving their groups could wait for them.
    atexit.register(_leave_process_groups)
    return result


def _leave_process_groups() -> None:
    """Destroy process groups, which Megatron does not: a communication thread would abort the ending process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def scheduling(args: Any, given: Mapping[str, Any]) -> Iterator[None]:
    """Install what the arguments ask for. Without any of our flags Megatron's scheduler is not touched.

    `given` has the arguments of `pretrain`, by name.
    """
    from megatron.scheduling.options.arguments import config_from_args

    with _or_end():
        config = config_from_args(args)
    if not config.active:
        yield
        return
    if config.report is not None:
        need_folder(config.report)
    upstream.say_absent(args, configuration=False)
    from bpipe.runtime.failures import Watch
    from megatron.scheduling import composing
    from megatron.scheduling.placement.chunks import Refused, refuse_group

    with _or_end():
        refuse_group(config.positions, given.get("pg_collection"))
        installed, reporter = composing.install(config, args)
    watch = Watch()
    watch.begin()
    try:
        yield
        if reporter is not None:
            reporter.finish()
        installed.remove()
    except Refused as error:
        # All ranks refuse at the same point, before any waits for another.
        _leave_process_groups()
        end(error)
    except Exception as error:
        first = watch.failed(error)
        if reporter is not None and first is not None:
            reporter.failed(first)
        raise
    finally:
        watch.end()
        # Without an effect after the removal above; otherwise the ending process frees everything itself.
        installed.remove(failed=True)


# That of argparse, from all ranks: there are no process groups yet to ask.
_STATUS = 2


def end(reason: object) -> NoReturn:
    """End the run for a reason that is the same on every rank."""
    if _rank() == 0:
        print(f"bpipe: error: {reason}", file=sys.stderr, flush=True)
    sys.exit(_STATUS)


def refuse_once(parser: argparse.ArgumentParser) -> None:
    """Let a parser print errors on rank 0 only, with the nearest flags to mistyped ones."""

    def error(message: str) -> NoReturn:
        if _rank() == 0:
            known = [flag for action in parser._actions for flag in action.option_strings]
            unknown = re.findall(r"(?<!\S)--?[^\s=]+", message) if message.startswith("unrecognized arguments:") else []
            for flag in unknown:
                for near in difflib.get_close_matches(flag, known, n=1):
                    message += f"\n  instead of {flag}, did you mean {near}?"
            parser.print_usage(sys.stderr)
            print(f"\n{parser.prog}: error: {message}", file=sys.stderr, flush=True)
        sys.exit(_STATUS)

    parser.error = error  # type: ignore[method-assign]


def need_folder(folder: str) -> None:
    """Make the folder of a report, or end the program if nothing can be written into it.

    Nodes may have different file systems, so the first process of each node prints the error.
    """
    try:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        first_node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")) == "0"
        if _rank() == 0 or (not first_node and os.environ.get("LOCAL_RANK") == "0"):
            where = "" if first_node else f" on {socket.gethostname()}"
            print(
                f"bpipe: error: --bpipe-report {folder}: {error.strerror or error}{where}", file=sys.stderr, flush=True
            )
        sys.exit(_STATUS)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


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
    # As `python SCRIPT` does: modules next to the script can be imported.
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
