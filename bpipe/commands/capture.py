"""`bpipe capture`: the launches of a training script, printed and in a file."""

import shlex
import sys
from pathlib import Path

from bpipe.config.flags import outputs
from bpipe.config.flags.flag import REST, Flag, Options, Task, command, group
from bpipe.config.flags.values import seconds
from bpipe.config.launch.capture import capture, command_line, write_launches
from bpipe.values import printable

COMMAND = command(
    group(
        "",
        Flag(REST, "", "after --: the command that starts the training", "COMMAND", default=(), count="*"),
        outputs.OUTPUT,
        Flag("timeout", "--timeout", "seconds after which the script is ended", "S", seconds, default=60.0),
    ),
    Task(
        "capture what a script launches, and predict it",
        "bpipe capture --output launch.json -- bash train.sh",
        "megatron output timeout",
    ),
)
_BEFORE = """\
capture: everything in the script runs, but torchrun, trainings by python, deepspeed, accelerate, srun, sbatch, mpirun,
ray, ssh, containers, pip and the like are replaced by stand-ins: none of them is started"""


def run(options: Options) -> int:
    command = options.megatron
    if not command:
        raise ValueError("name the command that starts the training after --: bpipe capture -- bash train.sh")
    print(_BEFORE, file=sys.stderr, flush=True)
    captured = capture(command, options.timeout)
    late = f"it ran longer than {options.timeout:g} s and was ended"
    if not captured.launches:
        for line in captured.last_lines:
            print(f"| {printable(line)}", file=sys.stderr)
        ended = late if captured.status is None else f"it ended with status {captured.status}"
        remedy = "give more time with --timeout, or s" if captured.status is None else "s"
        raise ValueError(
            f"{shlex.join(command)[:60]}: {ended}, and launched no training: {remedy}ee above what it printed last"
        )
    if captured.status is None:
        print(f"{late}: further launches are not known; give more time with --timeout", file=sys.stderr)
    if options.output is not None:
        Path(options.output).write_text(write_launches(captured.launches), encoding="utf-8")
    print("\n".join(map(command_line, captured.launches)))
    return 0
