"""Declare our flags to Megatron's parser.

In: an argparse parser. Out: the same with our group of flags; `arguments` reads what was given.

Imports no torch and no Megatron.
"""

from __future__ import annotations

import argparse
from typing import Any

from bpipe.flag_types import HOSTS_SAID, costs_of_halves, group_size, hop, numbers, share
from bpipe.generate.families import (
    DEFAULTS,
    FAMILIES,
    families_for_bounds,
    families_with_deferral,
    families_with_groups,
    families_with_shards,
)
from bpipe.generate.family import UnitCosts
from bpipe.ir.hosts import ARRANGEMENTS, PAIR
from bpipe.ir.layout import Vocabulary
from bpipe.models.layout import REDISTRIBUTE
from bpipe.plan.options import memory
from bpipe.plan.state_hosts import FLAG, read_moves
from bpipe.refusals import UNPROVEN
from bpipe.transport import AUTO, NAMES
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.placement.rank_order import PLACEMENTS

# How the output layer may be split in training, and how that is scheduled.
_SPLIT = {
    Vocabulary.ONE: "with everything else going on beside it",
    Vocabulary.TWO: "the same, with a micro-batch less on each rank, and what a shard gives back made before it is "
    "known exactly",
    Vocabulary.INTERLACED: "all ranks at once with nothing beside it",
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our group of flags; give this to Megatron as its `extra_args_provider`."""
    group = parser.add_argument_group("bpipe", "memory-balanced pipeline parallelism")
    for about in (_balancing, _trying, _schedule, _order, _looking):
        about(group)
    return parser


def _balancing(group: Any) -> None:
    """Whether and how activations move from rank to rank."""
    group.add_argument(
        "--bpipe",
        action="store_true",
        help="Balance activation memory over the pipeline stages: early stages send activations of some micro-batches "
        "to their partner stage and take them back before their backward pass. Changes no result.",
    )
    group.add_argument(
        "--bpipe-memory",
        type=memory,
        default=None,
        metavar="GIB|GIB,GIB,...|auto[:GIB]",
        help="With --bpipe: all that a device may hold, state, activations and what comes and goes, for all ranks or "
        "each; only what must "
        "leaves. By prediction; auto: the first iteration sends as much as helps, then bytes are measured and it is "
        "planned anew. auto "
        "alone: what the device has.",
    )
    group.add_argument(
        "--bpipe-cluster",
        default=None,
        metavar="DEVICE|FILE",
        help="With --bpipe-memory: what `bpipe simulate --cluster` is told, such as h100-80g. By its links and "
        "seconds, transfers that "
        "would not end in time are issued earlier, as the command plans it, with auto by measured bytes. Without it "
        "plans are by bytes.",
    )
    group.add_argument(
        FLAG,
        type=read_moves,
        default=None,
        metavar="RANK:HOST:GIB,...",
        help="So much of the optimizer's moments on RANK's devices waits on HOST's while micro-batches are computed, "
        "and is home for the "
        "update. `bpipe simulate` says where that helps. Works with and without --bpipe.",
    )
    group.add_argument(
        "--bpipe-transport",
        choices=(AUTO, *NAMES),
        default=AUTO,
        help="How activations travel between the two ranks of a pair. nccl, gloo: both ranks send and receive. peer: "
        "the evictor alone "
        "copies, into memory of its partner on the same machine. host: into its own host memory. auto: whichever the "
        "pair's link "
        "measures best at the start.",
    )
    group.add_argument(
        "--bpipe-placement",
        choices=PLACEMENTS,
        default="adjacent",
        help="adjacent: the two stages of a pair take GPUs of one node where they can. none: Megatron's own rank "
        "order.",
    )
    group.add_argument(
        "--bpipe-min-bytes",
        type=int,
        default=SchedulingConfig.minimum_bytes,
        metavar="BYTES",
        help="Saved tensors smaller than this stay where they are: moving them costs more than it frees.",
    )
    group.add_argument(
        "--bpipe-differing-sizes",
        action="store_true",
        help="Micro-batches of one stage may save differing sizes: host buffers get a reserve and grow between "
        "iterations, and a "
        "micro-batch that is too large for its own stays where it is, which is reported. Follows from dropless "
        "experts, packed sequences, "
        "variable lengths and partial recomputation by itself; a model of one's own has to say so.",
    )


def _trying(group: Any) -> None:
    """What is tried, mended or made visible."""
    group.add_argument(
        "--bpipe-unproven",
        choices=UNPROVEN,
        default=None,
        help="Try what is refused because it was never shown on a GPU. Compare the first losses with those of a run "
        "without --bpipe.",
    )
    group.add_argument(
        "--bpipe-no-repairs",
        action="store_true",
        help="Leave defects of the installed Megatron as they are. By default the log names each that is mended, in "
        "memory only. Works "
        "with and without --bpipe.",
    )
    group.add_argument(
        "--bpipe-poison",
        action="store_true",
        help="For debugging: fill memory with NaN before it is freed and before it is loaded into, so that a missing "
        "wait shows.",
    )
    group.add_argument(
        "--bpipe-sync-transfers",
        action="store_true",
        help="For measuring what overlap is worth: wait for every transfer where it is issued.",
    )


def _schedule(group: Any) -> None:
    """Which schedule runs, and by which loop."""
    group.add_argument(
        "--bpipe-schedule",
        default=None,
        metavar="NAME|FILE",
        help=f"The pipeline schedule: {', '.join(FAMILIES)}, or a file that `bpipe schedule --input` reads. By "
        f"default what Megatron's "
        f"own loop runs: {DEFAULTS[0]}, with virtual stages {DEFAULTS[1]}. These two it goes on running; any other is "
        f"run by a loop of "
        "our own. Works with and without --bpipe.",
    )
    group.add_argument(
        "--bpipe-vocabulary",
        choices=(*(one.value for one in _SPLIT), REDISTRIBUTE),
        default=None,
        help="Split the output layer over all ranks of the pipeline, which compute it between the last stage's "
        "forward and its backward: "
        f"{'; '.join(f'{one.value}, {what}' for one, what in _SPLIT.items())}. Of {families_with_shards()}, run by our "
        f"own loop. "
        f"{REDISTRIBUTE}: leave it whole, and give the last stage fewer layers, by a layout of Megatron's that is "
        f"chosen from the sizes. "
        "By default the last stage computes it, and layers are where they are.",
    )
    group.add_argument(
        "--bpipe-vocabulary-input",
        action="store_true",
        help="With --bpipe-vocabulary 1, 2 or interlaced: split the word embedding, too, over all ranks, which look "
        "tokens up two "
        "micro-batches ahead of the first stage. A weight that it shares with the output layer is one shard on every "
        "rank.",
    )
    group.add_argument(
        "--bpipe-executor",
        action="store_true",
        help="Run also what Megatron's own loop could by our loop. Changes no result.",
    )
    group.add_argument(
        "--bpipe-keep-weights-halves",
        choices=("linear", "none"),
        default=SchedulingConfig.keep_weights_halves,
        help="Where a schedule splits backwards, what it puts off: the weights' gradients of linear layers, or none, "
        "so that the whole "
        "backward runs at once.",
    )
    group.add_argument(
        "--bpipe-timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help=f"A transfer that has not ended after this time ({SchedulingConfig.timeout_s:g} by default), or a "
        f"message of our own loop (by "
        "default as long as Megatron waits for its own, --distributed-timeout-minutes), ends the run with an error "
        "that names it. On GPUs "
        "the host waits for none: there NCCL's watchdog ends the run, naming the process group, and copies of peer "
        "and host are not timed.",
    )


def _order(group: Any) -> None:
    """What a family of schedules that knows several orders chooses by."""
    group.add_argument(
        "--bpipe-group",
        type=_group,
        default=None,
        metavar="G|auto",
        help=f"Of {families_with_groups()} but Megatron's own: how many micro-batches go through a chunk before the "
        f"next. "
        f"auto: for "
        "--bpipe-bound chosen with the rest of the order, and without a bound the usual number.",
    )
    group.add_argument(
        "--bpipe-bound",
        type=numbers,
        default=None,
        metavar="N|N,N,...",
        help="With --bpipe: the most micro-batches of a chunk that a rank holds, one number for all or one for each; "
        "only what must "
        "leaves. By default the fewest that all pairs of ranks can keep. "
        f"{families_for_bounds()} without a number as --bpipe-group has its order chosen for one that all have.",
    )
    group.add_argument(
        "--bpipe-hosts",
        choices=ARRANGEMENTS,
        default=PAIR,
        help=f"With --bpipe: where what leaves a rank goes. {HOSTS_SAID}. With any but pair by --bpipe-memory or "
        f"--bpipe-bound; "
        "without, as much leaves as can.",
    )
    group.add_argument(
        "--bpipe-kept",
        type=share,
        default=None,
        metavar="W",
        help="Where a schedule splits backwards: the share of what a forward saved that is counted between the "
        "halves, such as 0.5; "
        "by default all of it.",
    )
    group.add_argument(
        "--bpipe-costs",
        type=_costs,
        default=None,
        metavar="F,I,W",
        help="Where a schedule splits backwards and is chosen among several: what a rank's forward and the halves of "
        "its backward of a "
        "micro-batch take, all its chunks together, such as 1,1.2,0.8; by default all alike.",
    )
    group.add_argument(
        "--bpipe-hop",
        type=hop,
        default=None,
        metavar="H",
        help="What a message from one rank to the next takes, in the unit of --bpipe-costs; by default no time.",
    )
    group.add_argument(
        "--bpipe-delay",
        type=int,
        default=None,
        metavar="N",
        help=f"Of {families_with_deferral()}: how many micro-batches' I stand before a W.",
    )


def _looking(group: Any) -> None:
    """What a run writes down of itself."""
    group.add_argument(
        "--bpipe-report",
        metavar="DIR",
        default=None,
        help="Write what every stage really held, beside what the schedule predicted, each iteration's exact loss and "
        "gradient norm, "
        "and a record of some iterations for `bpipe report DIR`. Works with and without --bpipe.",
    )
    group.add_argument(
        "--bpipe-report-iterations",
        default=None,
        metavar="FIRST-LAST",
        help="The iterations to record action by action: a number, or two with a hyphen between. By default the third "
        "to the fifth that "
        "this program trains.",
    )
    group.add_argument(
        "--bpipe-peak-tflops",
        type=float,
        default=None,
        metavar="TFLOPS",
        help="What one device can do at most in dense 16-bit TFLOP/s, for the MFU. By default from a table of devices.",
    )
    group.add_argument(
        "--terra-audit",
        type=int,
        default=None,
        metavar="N",
        help="Before a CUDA graph: compare what N micro-batches of each chunk issue in the second iteration, forward "
        "and backward, and say "
        "in the log, a source line each, what a capture of the stage would freeze, lose or break on. Of Megatron's "
        "own loops. Changes no "
        "result.",
    )


def _group(text: str) -> int | None:
    """None: chosen."""
    found = group_size(text)
    return None if isinstance(found, str) else found


def _costs(text: str) -> UnitCosts:
    try:
        return UnitCosts(*costs_of_halves(text))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{error}, a forward and the halves of a backward, F,I,W") from None
