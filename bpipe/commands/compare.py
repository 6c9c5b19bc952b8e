"""`bpipe compare`: compare two runs of one training. The exit status is 0 if they are equal, 1 if not, 2 for errors."""

from pathlib import Path

from bpipe.config.flags import outputs
from bpipe.config.flags.flag import Options, Task, command, group

COMMAND = command(
    group("", outputs.ONE_RUN, outputs.OTHER_RUN, outputs.TOLERANCE, outputs.COMMON),
    Task("compare two runs to the last bit", "bpipe compare runs/stock runs/balanced", "a b"),
    Task("compare two logs", "bpipe compare before.log after.log --tolerance 1e-5", "tolerance common"),
)


def run(options: Options) -> int:
    from bpipe.record.compare import compare, read_training, text

    first, second = (read_training(Path(path)) for path in (options.a, options.b))
    comparison = compare(first, second, options.tolerance, options.common)
    print(text(comparison), end="")
    return 0 if comparison.equal else 1
