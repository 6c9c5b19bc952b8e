"""Rows of the table for the outputs of commands, and those of a single command."""

from bpipe.config.flags.flag import Flag, Read, number
from bpipe.config.flags.values import tolerance

# -- what is written
# -------------------------------------------------------------------------------------------------------------------

FORMAT = Flag("format", "--format", "output format (default table)", default="table", choices=("table", "json"))
OUTPUT = Flag("output", "--output", "write the result to this file: a schedule, launches or a profile", "FILE")
HTML = Flag("html", "--html", "write a self-contained HTML page", "FILE")
TRACE = Flag("trace", "--trace", "write a timeline as Chrome trace JSON, for ui.perfetto.dev", "FILE")


def rows(default: int, read: Read) -> Flag:
    """Return the flag for the number of printed rows."""
    return Flag("rows", "--rows", f"number of rows to show (default {default})", "N", read, default=default)


# -- one command's own
# -----------------------------------------------------------------------------------------------------------------

EMIT_ARGS = number("emit_args", "--emit-args", "print only the Megatron flags of this row; the first row is 1", "ROW")

FOLDER = Flag("folder", "", "the run's --bpipe-report folder", "DIR")
BASELINE = Flag(
    "baseline",
    "--baseline",
    "the --bpipe-report folder of the same training without balancing: adds its measured peaks, and whether all losses "
    "are identical",
    "DIR",
)

ONE_RUN = Flag("a", "", "first run: its --bpipe-report folder, the iterations.jsonl in it, or its log", "A")
OTHER_RUN = Flag("b", "", "second run, given in the same way", "B")
TOLERANCE = Flag(
    "tolerance",
    "--tolerance",
    "how far two numbers may differ, relative to the larger (default 0)",
    "R",
    tolerance,
    default=0.0,
)
COMMON = Flag("common", "--common", "compare only the iterations that both runs have, as after a restart")

TIMED_LAYERS = number(
    "timed_layers",
    "--timed-layers",
    "number of layers to time; predictions scale this to a stage's own number (default 1)",
    default=1,
)
DEVICE = Flag(
    "device", "--device", "device to measure (default: cuda if there is one, else cpu)", choices=("cuda", "cpu")
)
REPEATS = number("repeats", "--repeats", "number of runs, of which the median counts (default 5)", default=5)
