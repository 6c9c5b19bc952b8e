"""The table's rows on what commands write, and those that one command alone has. Imports no model."""

from __future__ import annotations

from bpipe.flags.flag import Flag, Read
from bpipe.flags.values import counted, positive, seconds, tolerance

# After a start so many iterations are no steady ones: libraries load, communicators form and the allocator grows.
WARM_UP_ITERATIONS = 5

# -- what is written
# -------------------------------------------------------------------------------------------------------------------

FORMAT = Flag("format", "--format", "what is printed (default table)", default="table", choices=("table", "json"))
OUTPUT = Flag(
    "output",
    "--output",
    "write what the command makes there: a schedule, a calibration, a profile, what differs",
    "FILE",
)
PLOT = Flag("plot", "--plot", "draw a picture, .svg or .png", "FILE")
HTML = Flag("html", "--html", "write a page to look at, in one file that needs nothing else", "FILE")
TRACE = Flag("trace", "--trace", "write what ran when as Chrome trace JSON, for ui.perfetto.dev", "FILE")


def rows(default: int, read: Read) -> Flag:
    """Return the flag that says how many rows are printed."""
    return Flag("rows", "--rows", f"how many rows to show (default {default})", "N", read, default=default)


# -- one command's own
# -----------------------------------------------------------------------------------------------------------------

FRONT = Flag("front", "--front", "what is fastest for every amount of memory, up to twice what a device has")
EMIT_ARGS = Flag("emit_args", "--emit-args", "print only the Megatron flags of a row, the first is 1", "ROW", positive)

COMPARED = Flag(
    "compare",
    "--compare",
    "two sets of flags of this command, each as one word, laid over the others: both predictions side by side. '' is the "
    "command as it stands, the name of a script that launch; a single flag stands behind a space",
    "FLAGS",
    count=2,
)

TWO_SIZES = Flag(
    "micro_batch",
    "--micro-batch-size --mbs",
    "the size that fits, and the one balancing makes fit",
    "N",
    positive,
    count=2,
    required=True,
)
STAGE_MFU = Flag(
    "stage_mfu",
    "--stage-mfu",
    "MFU of one stage alone at either size, in percent",
    "PERCENT",
    float,
    count=2,
    required=True,
)
STAGE_SECONDS = Flag(
    "stage_seconds",
    "--stage-seconds",
    "forward plus backward of one stage at either size: gives iteration times, too",
    "S",
    seconds,
    count=2,
)

RUN = Flag("run_of", "", "the folder of a --bpipe-report, or a log that a Megatron training printed", "RUN", count="?")
WARM_UP = Flag(
    "warm_up",
    "--warm-up",
    f"iterations to leave out after a start (default {WARM_UP_ITERATIONS})",
    "N",
    counted,
    default=WARM_UP_ITERATIONS,
)
MEASURED = Flag(
    "measured", "--measured", "instead of a run: what an iteration of this configuration takes", "SECONDS", seconds
)

FOLDER = Flag("folder", "", "what the run was given as --bpipe-report", "DIR")
ITERATION = Flag(
    "iteration", "--iteration", "only this one (default: all that are recorded, times being their median)", "N", int
)

ONE_RUN = Flag("a", "", "the --bpipe-report folder of one run, the iterations.jsonl in it, or its log", "A")
OTHER_RUN = Flag("b", "", "the same of the other run", "B")
TOLERANCE = Flag(
    "tolerance",
    "--tolerance",
    "how far two numbers may be apart, as a part of the larger (default 0)",
    "R",
    tolerance,
    default=0.0,
)
COMMON = Flag("common", "--common", "compare the iterations that both runs have, as after a restart")
BALANCING = Flag("balancing", "--balancing", "A must have run without balancing, and B with it")
ITERATIONS = Flag(
    "iterations", "--iterations", "iterations that must be there, from 1 to N and no others", "N", positive
)

TIMED_LAYERS = Flag(
    "timed_layers",
    "--timed-layers",
    "layers to time; readers scale to a stage's own number (default 1)",
    "N",
    positive,
    default=1,
)
DEVICE = Flag("device", "--device", "default: cuda where there is one, else cpu", choices=("cuda", "cpu"))
REPEATS = Flag("repeats", "--repeats", "the median of N runs counts (default 5)", "N", positive, default=5)
TIME_KERNELS = Flag(
    "time_kernels",
    "--time-kernels",
    "time products of matrices, the attention core and gathers over T processes, not a stage",
)
