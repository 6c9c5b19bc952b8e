"""Rows of the table that only the trainer has, and the groups of all its flags, `--bpipe-...` in Megatron's parser."""

from collections.abc import Callable, Collection

from bpipe.config.flags import configurations, schedules
from bpipe.config.flags.flag import Flag, InLaunch, group
from bpipe.config.flags.values import factor, iterations, positive, seconds
from bpipe.placement import PLACEMENTS
from bpipe.transport import AUTO, NAMES
from bpipe.transport.config import TransferConfig


def _flag(
    name: str,
    text: str,
    value: str = "",
    read: Callable[[str], object] | None = None,
    default: object = None,
    choices: Collection[str] | None = None,
) -> Flag:
    """Return a row without a name in commands."""
    launch = InLaunch(name, default, is_read=name in ("--bpipe", "--bpipe-min-bytes"))
    field = name[2:].replace("-", "_").removeprefix("bpipe_")
    return Flag(field, "", text, value, read, default, choices, launch=launch)


BPIPE = _flag(
    "--bpipe",
    "balance activation memory over the pipeline stages: early stages send activations of some micro-batches to "
    "their partner stage, and load them back before their backward. Changes no result",
)
MIN_BYTES = _flag(
    "--bpipe-min-bytes",
    "leave saved tensors smaller than this where they are: moving them costs more than it frees (default "
    f"{TransferConfig.minimum_bytes})",
    "BYTES",
    positive,
    TransferConfig.minimum_bytes,
)
TRAINER = (
    group(
        "balancing",
        BPIPE,
        configurations.MEMORY,
        configurations.CLUSTER,
        schedules.BOUND,
        schedules.HOSTS,
        _flag(
            "--bpipe-transport",
            f"how activations travel between the two ranks of a pair (default {AUTO}). nccl, gloo: both ranks "
            "send and receive. peer: the evicting rank alone copies, into memory of its partner on the same "
            "machine. host: it copies into its own node's CPU memory. auto: whichever is measured as the "
            "fastest for the pair at the start",
            default=AUTO,
            choices=(AUTO, *NAMES),
        ),
        _flag(
            "--bpipe-placement",
            "adjacent: put the two stages of a pair on GPUs of one node where possible; none: keep Megatron's "
            f"own rank order (default {PLACEMENTS[0]})",
            default=PLACEMENTS[0],
            choices=PLACEMENTS,
        ),
        MIN_BYTES,
        configurations.DIFFERING_SIZES,
        _flag(
            "--bpipe-timeout",
            f"seconds after which a transfer (default {TransferConfig.timeout_s:g}) or a message of this project's own loop "
            "(default: Megatron's --distributed-timeout-minutes) ends the run with an error that names it. Not "
            "for transfers on GPUs: there NCCL's watchdog ends the run and names the process group, and copies "
            "by peer and host have no limit",
            "SECONDS",
            seconds,
        ),
    ),
    group(
        "schedule",
        schedules.SCHEDULE,
        *schedules.ORDER,
        configurations.SLICE_LENGTHS,
        schedules.COSTS,
        schedules.HOP,
        configurations.KEEP_WEIGHTS_HALVES,
        schedules.VOCABULARY,
        schedules.VOCABULARY_INPUT,
        _flag(
            "--bpipe-executor",
            "use this project's own loop also for schedules that Megatron's own loops run. Changes no result",
        ),
    ),
    group(
        "recording",
        _flag(
            "--bpipe-report",
            "record the run in this folder, for `bpipe report DIR`: what every stage really held and what was "
            "predicted, each iteration's exact loss and gradient norm, and some iterations action by action. "
            "Works with and without --bpipe",
            "DIR",
        ),
        _flag(
            "--bpipe-report-iterations",
            "iterations to record action by action: a number, or two with a hyphen between them (default: the "
            "third to the fifth that this program trains)",
            "FIRST-LAST",
        ),
        _flag(
            "--bpipe-peak-tflops",
            "peak dense 16-bit TFLOP/s of one device, for the MFU (default: from a table of devices)",
            "TFLOPS",
            factor,
        ),
    ),
    group(
        "debugging",
        _flag(
            "--bpipe-strict",
            "also refuse guarded features: they should work by design, but never ran on this hardware, and are "
            "checked in the first iterations",
        ),
        _flag(
            "--bpipe-share-gpus",
            "to try everything on fewer GPUs than ranks: the ranks of one node share its GPUs, round robin, and "
            "NCCL talks through loopback sockets. Results are as with a GPU each; no time means anything. Works "
            "with and without --bpipe",
        ),
        _flag(
            "--bpipe-verify",
            "in the first N iterations, compare checksums of everything that is evicted: before it is sent, "
            "before its memory is freed, and before it is used again (default: 2 if anything is guarded, else "
            "0). A difference is named, and ends the run before weights are updated",
            "N|all",
            iterations,
        ),
        _flag(
            "--bpipe-poison",
            "for debugging: fill memory with NaN before it is freed, and before activations are loaded into "
            "it, so that a missing wait shows",
        ),
        _flag("--bpipe-sync-transfers", "for measuring what overlap gains: wait for every transfer where it is issued"),
    ),
)
