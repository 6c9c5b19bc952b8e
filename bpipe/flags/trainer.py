"""The table's rows that the trainer alone has, and all that it has: Megatron's parser gets these as `--bpipe-...`.

Imports no torch and no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from bpipe.flags import configurations, schedules
from bpipe.flags.budgets import MINIMUM_BYTES, read_moves
from bpipe.flags.flag import Flag, Group, InLaunch
from bpipe.flags.values import factor, iterations, positive, seconds
from bpipe.placement import PLACEMENTS
from bpipe.transport import AUTO, NAMES

# Seconds after which a transfer that has not ended ends the run.
TIMEOUT_S = 300.0


def _flag(
    name: str,
    text: str,
    value: str = "",
    read: Callable[[str], object] | None = None,
    default: object = None,
    choices: Collection[str] | None = None,
) -> Flag:
    """Return a row without a command's name."""
    launch = InLaunch(name, default, is_read=name in ("--bpipe", "--bpipe-min-bytes"))
    field = name[2:].replace("-", "_").removeprefix("bpipe_")
    return Flag(field, "", text, value, read, default, choices, launch=launch)


BPIPE = _flag(
    "--bpipe",
    "balance activation memory over the pipeline stages: early stages send activations of some micro-batches to their "
    "partner stage and "
    "take them back before their backward pass. Changes no result",
)
OPTIMIZER_HOSTS = _flag(
    "--bpipe-optimizer-hosts",
    "so much of the optimizer's moments on RANK's devices waits on HOST's while micro-batches are computed, and is "
    "home for the update. "
    "`bpipe simulate` says where that helps. Works with and without --bpipe",
    "RANK:HOST:GIB,...",
    read_moves,
)
MIN_BYTES = _flag(
    "--bpipe-min-bytes",
    "saved tensors smaller than this stay where they are: moving them costs more than it frees",
    "BYTES",
    positive,
    MINIMUM_BYTES,
)
TRAINER = (
    Group(
        "balancing",
        (
            BPIPE,
            configurations.MEMORY,
            configurations.CLUSTER,
            schedules.BOUND,
            schedules.HOSTS,
            OPTIMIZER_HOSTS,
            _flag(
                "--bpipe-transport",
                "how activations travel between the two ranks of a pair. nccl, gloo: both ranks send and receive. "
                "peer: the evictor alone "
                "copies, into memory of its partner on the same machine. host: into its own host memory. auto: "
                "whichever the pair's link "
                "measures best at the start",
                default=AUTO,
                choices=(AUTO, *NAMES),
            ),
            _flag(
                "--bpipe-placement",
                "adjacent: the two stages of a pair take GPUs of one node where they can. none: Megatron's own rank "
                "order",
                default=PLACEMENTS[0],
                choices=PLACEMENTS,
            ),
            MIN_BYTES,
            configurations.DIFFERING_SIZES,
            _flag(
                "--bpipe-timeout",
                f"a transfer that has not ended after this time ({TIMEOUT_S:g} by default), or a message of our own "
                f"loop (by default as "
                "long as Megatron waits for its own, --distributed-timeout-minutes), ends the run with an error that "
                "names it. On GPUs the "
                "host waits for none: NCCL's watchdog ends the run, naming the process group, and copies of peer and "
                "host are not timed",
                "SECONDS",
                seconds,
            ),
        ),
    ),
    Group(
        "schedule",
        (
            schedules.SCHEDULE,
            schedules.GROUP,
            schedules.DELAY,
            schedules.SLICES,
            configurations.SLICE_LENGTHS,
            schedules.KEPT,
            schedules.COSTS,
            schedules.HOP,
            configurations.KEEP_WEIGHTS_HALVES,
            schedules.VOCABULARY,
            schedules.VOCABULARY_INPUT,
            _flag("--bpipe-executor", "run also what Megatron's own loop could by our loop. Changes no result"),
        ),
    ),
    Group(
        "record",
        (
            _flag(
                "--bpipe-report",
                "write what every stage really held, beside what the schedule predicted, each iteration's exact loss "
                "and gradient norm, "
                "and a record of some iterations for `bpipe report DIR`. Works with and without --bpipe",
                "DIR",
            ),
            _flag(
                "--bpipe-report-iterations",
                "the iterations to record action by action: a number, or two with a hyphen between. By default the "
                "third to the fifth that "
                "this program trains",
                "FIRST-LAST",
            ),
            _flag(
                "--bpipe-peak-tflops",
                "what one device can do at most in dense 16-bit TFLOP/s, for the MFU. By default from a table of "
                "devices",
                "TFLOPS",
                factor,
            ),
        ),
    ),
    Group(
        "trying and mending",
        (
            _flag(
                "--bpipe-strict",
                "refuse also what is guarded: right by construction, never shown on this hardware, and checked in the "
                "first iterations",
            ),
            _flag(
                "--bpipe-no-repairs",
                "leave defects of the installed Megatron as they are. By default the log names each that is mended, "
                "in memory only. Works "
                "with and without --bpipe",
            ),
            _flag(
                "--bpipe-verify",
                "in the first N iterations compare checksums of everything that leaves a rank before it leaves, before "
                "its memory is freed and before it is used again. What differs ends the run before weights are "
                "updated, and is named. By default 2 where anything is guarded, else 0",
                "N|all",
                iterations,
            ),
            _flag(
                "--bpipe-poison",
                "for debugging: fill memory with NaN before it is freed and before it is loaded into, so that a "
                "missing wait shows",
            ),
            _flag(
                "--bpipe-sync-transfers",
                "for measuring what overlap is worth: wait for every transfer where it is issued",
            ),
            _flag(
                "--terra-audit",
                "before a CUDA graph: compare what N micro-batches of each chunk issue in the second iteration, "
                "forward and backward, and "
                "say in the log, a source line each, what a capture of the stage would freeze, lose or break on. Of "
                "Megatron's own loops. "
                "Changes no result",
                "N",
                int,
            ),
        ),
    ),
)
