"""Rows of the table for schedules, in `bpipe schedule`, predictions and the trainer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bpipe.balance.config import BALANCES
from bpipe.config.flags.flag import Flag, InLaunch, number
from bpipe.config.flags.values import AUTO, costs, costs_in_training, counted, group_size, hop, unit_costs
from bpipe.schedule.families.families import (
    DEFAULTS,
    FAMILIES,
    families_for_bounds,
    families_that_take,
    families_with_interlacing,
    families_with_shards,
)
from bpipe.schedule.families.family import TAKEN
from bpipe.schedule.files.text import read_numbers
from bpipe.schedule.hosts import ARRANGEMENTS, PAIR
from bpipe.schedule.layout import TRAINED_SHARDS, Vocabulary
from bpipe.schedule.program import Exchange

# A file's suffix says its format.
FORMATS = ("grid", "csv", "json", "svg")

HOSTS_SAID = (
    "pair: the other rank of its pair; pool: any rank with memory to spare; host: the CPU memory of its own node; "
    f"all: any rank with memory to spare, and the CPU memory of its own node for the rest (default {PAIR})"
)
_SPLIT = (
    "1, 2: by algorithm 1 or 2, while other computations go on; interlaced: on all ranks at once, with nothing "
    f"else meanwhile (only {families_with_interlacing()})"
)

_MEGATRONS = ", ".join(name for name, family in FAMILIES.items() if family.exchange is not Exchange.POSTED)

SCHEDULE = Flag(
    "schedule",
    "--schedule",
    f"family of schedules (default {', or '.join(DEFAULTS)} with several chunks per rank)",
    # The table itself: a family of one's own may be added to it.
    choices=FAMILIES,
    launch=InLaunch(
        "--bpipe-schedule",
        choices=(),
        value="NAME|FILE",
        help=f"pipeline schedule: {', '.join(FAMILIES)}, or a file that `bpipe schedule --input` reads "
        f"(default: {', or '.join(DEFAULTS)} with virtual stages). Megatron's own loops run "
        f"{_MEGATRONS}; this project's own loop runs all others. Works with and without --bpipe",
    ),
)
PIPELINE = number(
    "pipeline", "--pipeline-model-parallel-size --pp", "number of pipeline ranks", "P", launch=InLaunch(default=1)
)
GLOBAL_BATCH = number("global_batch", "--global-batch-size --gbs", "sequences per iteration", "B", launch=InLaunch())
MICROBATCHES = number("microbatches", "--microbatches", "micro-batches per iteration", "M")
CHUNKS = number(
    "chunks",
    "--num-virtual-stages-per-pipeline-rank --vp",
    "model chunks per rank (default: the fewest that the schedule allows, 1 or 2)",
    "V",
    launch=InLaunch(),
)
GROUP = Flag(
    "group_size",
    "--group",
    "number of micro-batches that go through one chunk before the next chunk (default: as many as pipeline ranks, "
    f"or half as many for {families_for_bounds()}). auto: chosen for --bound, with the rest of the order. For "
    f"{families_that_take('group_size')}",
    "G|auto",
    group_size,
    launch=InLaunch("--bpipe-group"),
)
SLICES = number(
    "slices",
    "--slices",
    "cut every micro-batch's sequence into K slices, which go through the pipeline one after the other (default "
    f"1). For {families_that_take('slices')}",
    "K",
    launch=InLaunch("--bpipe-slices"),
)
DELAY = Flag(
    "delay",
    "--delay",
    "number of micro-batches by which the weight gradients (W) come later than the input gradient (I) (default 0: "
    f"directly after it). For {families_that_take('delay')}",
    "N",
    counted,
    launch=InLaunch("--bpipe-delay"),
)
# The options of families, with the names of their fields in `FamilyOptions`. A new option is a field there and a row here.
ORDER = (GROUP, DELAY, SLICES)
COSTS = Flag(
    "costs",
    "--costs",
    "relative durations of a rank's forward and backward per micro-batch, or of its forward, input gradient and "
    "weight gradients, all chunks together (default 1,2 and 1,1,1)",
    "F,B|F,I,W",
    costs,
    launch=InLaunch(
        "--bpipe-costs",
        read=costs_in_training,
        value="F,I,W",
        help="relative durations of a rank's forward, input gradient and weight gradients per "
        "micro-batch, all its chunks together, such as 1,1.2,0.8 (default: all equal). A "
        "schedule with split backwards may choose its order by them",
    ),
)
HOP = Flag(
    "hop",
    "--hop",
    "time that a message takes from one rank to the next, in the unit of --costs (default 0)",
    "H",
    hop,
    launch=InLaunch("--bpipe-hop"),
)
VOCABULARY = Flag(
    "vocabulary_parallel",
    "--vocabulary",
    f"split the output layer into shards on all pipeline ranks (default none: it stays whole). {_SPLIT}. For "
    f"{families_with_shards()}",
    choices=tuple(kind.value for kind in Vocabulary),
    launch=InLaunch(
        "--bpipe-vocabulary",
        choices=TRAINED_SHARDS,
        help="split the output layer over all pipeline ranks, which compute it between the last "
        f"stage's forward and backward (default: the last stage computes it whole). {_SPLIT}. For "
        f"{families_with_shards()}, run by this project's own loop",
    ),
)
VOCABULARY_INPUT = Flag(
    "input_shards",
    "--vocabulary-input",
    "with --vocabulary 1, 2 or interlaced: split the embedding into shards, too; ranks look tokens up two "
    "micro-batches ahead of the first stage. If it shares its weight with the output layer, every rank has one "
    "shard for both",
    launch=InLaunch("--bpipe-vocabulary-input"),
)
# What only a generated schedule is asked.
GENERATED = (*ORDER, COSTS, HOP)


def schedule_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `ScheduleConfig` that follow from the values of `GENERATED` and the vocabulary's rows.

    What is None, "auto" or missing has the field's default.
    """
    order = {name: values.get(name) for name in TAKEN}
    vocabulary = values.get("vocabulary_parallel")
    return {
        **{name: TAKEN[name].default if value in (None, AUTO) else value for name, value in order.items()},
        "costs": replace(unit_costs(values.get("costs")), hop=values.get("hop") or 0),
        "vocabulary": Vocabulary.WHOLE if vocabulary is None else Vocabulary(vocabulary),
        "input_shards": bool(values.get("input_shards")),
    }


BALANCE = Flag(
    "balance",
    "--balance",
    "bpipe: keep every rank within its bound by moving activations to other memory (default none)",
    default=BALANCES[0],
    choices=BALANCES,
)
BOUND = Flag(
    "bound",
    "--bound",
    "with --balance bpipe: the most micro-batches of one chunk whose activations a rank may hold, for all ranks or "
    "for each; only the excess is evicted (default: the smallest that all pairs can keep). Without --group, "
    f"{families_for_bounds()} makes its order for a bound that is equal on all ranks",
    "N|N,N,...",
    read_numbers,
    launch=InLaunch("--bpipe-bound"),
)
HOSTS = Flag(
    "hosts",
    "--hosts",
    f"with --balance bpipe: where a rank's evicted activations go. {HOSTS_SAID}. All but {PAIR} evict as much as "
    "possible unless a bound or a memory budget is given",
    choices=ARRANGEMENTS,
    launch=InLaunch("--bpipe-hosts", PAIR),
)
BUFFERS_STAY = Flag(
    "buffers_stay",
    "--buffers-stay",
    "with an order that is chosen for --bound: count host buffers all the time, as a training run does",
)
PARTNERS = Flag(
    "partners",
    "--partners",
    "for each rank, the rank that hosts its activations (default: the fullest rank with the emptiest)",
    "N,N,...",
    read_numbers,
)
INPUT = Flag("input", "--input", "read the schedule from a CSV or JSON file ('-': standard input)", "FILE")
ALIGN = Flag("align", "--align", "with --input: place computations on the unit grid anew, in each rank's order")
SCHEDULE_FORMAT = Flag(
    "format", "--format", "output format (default: by the output file's ending, else grid)", choices=FORMATS
)
