"""The table's rows on schedules: what `bpipe schedule`, predictions and the trainer have alike. Imports no model."""

from __future__ import annotations

from bpipe.balance.config import BALANCES
from bpipe.flags.flag import Flag, InLaunch
from bpipe.flags.values import costs, costs_in_training, counted, group_size, hop, numbers, positive, seconds, share
from bpipe.generate.families import (
    DEFAULTS,
    FAMILIES,
    families_for_bounds,
    families_with_deferral,
    families_with_early_forwarding,
    families_with_groups,
    families_with_shards,
    families_with_slices,
)
from bpipe.ir.hosts import ARRANGEMENTS, PAIR
from bpipe.ir.layout import REDISTRIBUTE, TRAINED_SHARDS, Vocabulary
from bpipe.ir.program import Exchange

# A file's suffix says its format, but for the last, which is CSV, too.
SUFFIXES = ("grid", "csv", "json", "svg", "png")
FORMATS = (*SUFFIXES, "runtime")
# Seconds in which a shortest order is looked for.
TIME_LIMIT_S = 60.0

HOSTS_SAID = (
    "pair: to the other of its pair; pool: to any rank with room; host: into its own node's memory; all: to any rank "
    "with room, and what "
    f"none has room for into its own node's memory (default {PAIR})"
)
_SPLIT = (
    "1 and 2: with everything else beside it, by algorithm 1 or 2; interlaced: all ranks at once with nothing beside it"
)

SCHEDULE = Flag(
    "schedule",
    "--schedule",
    f"the family of schedules (default {', with chunks '.join(DEFAULTS)})",
    # The table itself: a family of one's own may be added to it.
    choices=FAMILIES,
    launch=InLaunch(
        "--bpipe-schedule",
        choices=(),
        value="NAME|FILE",
        help=f"the pipeline schedule: {', '.join(FAMILIES)}, or a file that `bpipe schedule --input` reads. By "
        f"default what Megatron's own "
        f"loop runs: {DEFAULTS[0]}, with virtual stages {DEFAULTS[1]}. These two it goes on running; any other is run "
        f"by a loop of our "
        "own. Works with and without --bpipe",
    ),
)
PIPELINE = Flag(
    "pipeline", "--pipeline-model-parallel-size --pp", "pipeline ranks", "P", positive, launch=InLaunch(default=1)
)
GLOBAL_BATCH = Flag(
    "global_batch", "--global-batch-size --gbs", "sequences an iteration", "B", positive, launch=InLaunch()
)
MICROBATCHES = Flag("microbatches", "--microbatches", "micro-batches per iteration", "M", positive)
CHUNKS = Flag(
    "chunks",
    "--num-virtual-stages-per-pipeline-rank --vp",
    "model chunks per rank (default: the fewest that the schedule has, 1 or 2)",
    "V",
    positive,
    launch=InLaunch(),
)
GROUP = Flag(
    "group",
    "--group",
    f"of {families_with_groups()}: micro-batches that go through a chunk before the next (default: P, or P/2); auto: "
    f"chosen with the rest of "
    "the order for --bound",
    "G|auto",
    group_size,
    launch=InLaunch("--bpipe-group"),
)
SLICES = Flag(
    "slices",
    "--slices",
    f"of {families_with_slices()}: cut every micro-batch's sequence into K slices, which go through the pipeline one "
    f"behind the other (default 1)",
    "K",
    positive,
    launch=InLaunch("--bpipe-slices"),
)
DELAY = Flag(
    "delay",
    "--delay",
    f"of {families_with_deferral()}: how many micro-batches' I stand before a W (default 0: W follows its I)",
    "N",
    counted,
    launch=InLaunch("--bpipe-delay"),
)
EARLY = Flag(
    "early",
    "--early",
    f"of {families_with_early_forwarding()}: early forwarding, which lets more micro-batches in for less waiting",
)
COSTS = Flag(
    "costs",
    "--costs",
    "what a rank's forward and backward, or its halves, of a micro-batch take, all chunks together (default 1,2 and "
    "1,1,1)",
    "F,B|F,I,W",
    costs,
    launch=InLaunch(
        "--bpipe-costs",
        read=costs_in_training,
        value="F,I,W",
        help="where a schedule splits backwards and is chosen among several: what a rank's forward and the halves of "
        "its backward of a "
        "micro-batch take, all its chunks together, such as 1,1.2,0.8; by default all alike",
    ),
)
HOP = Flag(
    "hop",
    "--hop",
    "what a message from one rank to the next takes, in the unit of --costs (default 0)",
    "H",
    hop,
    launch=InLaunch("--bpipe-hop"),
)
KEPT = Flag(
    "kept",
    "--kept",
    "where backwards are split: the share of a micro-batch that is held between I and W, such as 0.5 (default: the "
    "file's, or 1)",
    "W",
    share,
    launch=InLaunch("--bpipe-kept"),
)
VOCABULARY = Flag(
    "vocabulary_parallel",
    "--vocabulary",
    f"of {families_with_shards()}: the output layer in shards on all pipeline ranks. {_SPLIT} (default none: it is "
    f"whole)",
    choices=tuple(one.value for one in Vocabulary),
    launch=InLaunch(
        "--bpipe-vocabulary",
        choices=(*TRAINED_SHARDS, REDISTRIBUTE),
        help="split the output layer over all ranks of the pipeline, which compute it between the last stage's "
        "forward and its backward. "
        f"{_SPLIT}. Of {families_with_shards()}, run by our own loop. {REDISTRIBUTE}: leave it whole, and give the "
        f"last "
        f"stage fewer layers, "
        "chosen from the sizes. By default the last stage computes it, and layers are where they are",
    ),
)
VOCABULARY_INPUT = Flag(
    "input_shards",
    "--vocabulary-input",
    "with --vocabulary 1, 2 or interlaced: the embedding in shards, too, where ranks look tokens up two micro-batches "
    "ahead of the first "
    "stage. A weight that it shares with the output layer is one shard on every rank",
    launch=InLaunch("--bpipe-vocabulary-input"),
)
BALANCE = Flag(
    "balance",
    "--balance",
    "bpipe: keep every rank within its bound by moving activations (default none)",
    default=BALANCES[0],
    choices=BALANCES,
)
BOUND = Flag(
    "bound",
    "--bound",
    "with --balance bpipe: most saved micro-batches of a chunk, for all ranks or each; only what must leaves "
    "(default: the fewest that all "
    f"pairs can keep). {families_for_bounds()} without --group has its order chosen for one that all have",
    "N|N,N,...",
    numbers,
    launch=InLaunch("--bpipe-bound"),
)
HOSTS = Flag(
    "hosts",
    "--hosts",
    f"with --balance bpipe, where what leaves a rank goes. {HOSTS_SAID}. With any but {PAIR} by --memory or --bound; "
    f"without, as much "
    "leaves as can",
    choices=ARRANGEMENTS,
    launch=InLaunch("--bpipe-hosts", PAIR),
)
BUFFERS_STAY = Flag(
    "buffers_stay",
    "--buffers-stay",
    "where an order is chosen for --bound: host buffers count always, as in a training",
)
PARTNERS = Flag(
    "partners",
    "--partners",
    "for each rank the one that hosts for it (default: fullest with emptiest)",
    "N,N,...",
    numbers,
)
OPTIMAL = Flag(
    "optimal",
    "--optimal",
    "of all orders of its computations the shortest in which no rank holds more than M chunk micro-batches, proved "
    "(needs OR-tools)",
    "M",
    positive,
)
TIME_LIMIT = Flag(
    "time_limit", "--time-limit", f"with --optimal: seconds to look for it (default {TIME_LIMIT_S:g})", "S", seconds
)
INPUT = Flag("input", "--input", "read the schedule from a CSV, JSON or grid file ('-' is standard input)", "FILE")
ALIGN = Flag("align", "--align", "with --input: place each rank's order anew on the unit grid")
SCHEDULE_FORMAT = Flag(
    "format",
    "--format",
    "default: by the output file's name, else grid; runtime: csv with torch's messages",
    choices=FORMATS,
)
MESSAGES = Flag(
    "messages", "--messages", "print what every rank does, messages included, as text or with --format json"
)
EXCHANGE = Flag(
    "exchange",
    "--exchange",
    "with --messages: when ranks send and receive (default: as the schedule is run)",
    choices=tuple(one.value for one in Exchange),
)
