"""`bpipe calibrate`: how far a cluster is from its prediction, by one run, as a file for `--calibration`.

The run is a folder of `--bpipe-report`, a log that Megatron printed, or seconds.
"""

from itertools import pairwise
from pathlib import Path

from bpipe.commands.launch import CONFIGURED, cluster_of, lines, words_of
from bpipe.commands.simulate import budgeted
from bpipe.commands.terminal import print_json, tell
from bpipe.config.flags import outputs
from bpipe.config.flags.flag import Options, Task, command, group
from bpipe.config.launch.megatron_command import read_command
from bpipe.plan.calibrate import Calibration, Ran, Steady, calibrate, steady
from bpipe.plan.candidates import describe
from bpipe.plan.options import filled, setup_of
from bpipe.predict.layout import Setup
from bpipe.record.compare import read_training

COMMAND = command(
    group("run", outputs.RUN, outputs.MEASURED, outputs.WARM_UP),
    *CONFIGURED,
    group("output", outputs.OUTPUT, outputs.FORMAT),
    Task(
        "compare a log with the prediction of its launch",
        "bpipe calibrate train.log --cluster h100-80g --launch launch.json --output cluster.json",
        "run_of cluster launch warm_up output",
    ),
    Task(
        "describe the run by flags",
        "bpipe calibrate --measured 12.5 --model gpt3-13b --cluster a100-80g:4 --pp 4 --gbs 8",
        "measured model tensor pipeline micro_batch global_batch",
    ),
)


def run(options: Options) -> None:
    if (options.measured is None) == (options.run_of is None):
        raise ValueError("give either a run's folder or log, or --measured SECONDS")
    # What is calibrated is the prediction as it stands.
    options.calibration = None
    words = words_of(options)
    reading = None if words is None else read_command(words)
    filled_options = filled(options, reading, ("pipeline", "global_batch"))
    setup, _ = budgeted(filled_options, setup_of(filled_options, cluster_of(filled_options, reading)))
    measured = None if options.run_of is None else _steady(Path(options.run_of), setup, options.warm_up)
    seconds = options.measured if measured is None else measured.median_s
    calibration = calibrate(setup, seconds, options.run_of or "--measured")
    if options.output is not None:
        Path(options.output).write_text(calibration.write(), encoding="utf-8")
    if options.format == "json":
        print_json({**calibration.document(), "iterations": None if measured is None else measured._asdict()})
        return
    tell(*lines(reading), *_text(setup, measured, calibration))
    if options.output is None:
        tell("to keep this for --calibration of bpipe simulate and bpipe plan, give --output FILE")


def _text(setup: Setup, measured: Steady | None, calibration: Calibration) -> list[str]:
    median = ""
    if measured is not None:
        median = (
            f", the median of {measured.num} after the warm-up; the middle half took {measured.low_s:.3f} to "
            f"{measured.high_s:.3f} s"
        )
    factor, devices = calibration.factor, f"{setup.cluster.num_devices} {setup.cluster.device.name}"
    slower = f"{abs(100 * (factor - 1)):.1f} % {'longer' if factor >= 1 else 'less time'}"
    return [
        f"measured   {calibration.measured_s:.3f} s per iteration{median}",
        f"predicted  {calibration.predicted_s:.3f} s: {describe(setup)}, batch {setup.global_batch} on {devices}",
        f"factor     {factor:.4f}: this cluster takes {slower} than predicted",
    ]


def _steady(run_of: Path, setup: Setup, warm_up: int) -> Steady:
    """Return the steady times of the run's iterations with this batch size.

    A line of a log may cover several iterations; the log does not say how many the first line covers.
    """
    training = read_training(run_of)
    numbers = sorted(training.seconds)
    interval = min((following - number for number, following in pairwise(numbers)), default=1)
    spans, sizes, before = [], set(), (numbers[0] if numbers else interval) - interval
    for number in numbers:
        size = training.iterations[number].get("global batch size") or setup.global_batch
        sizes.add(size)
        if size == setup.global_batch:
            spans.append(Ran(before + 1, number, training.seconds[number]))
        before = number
    try:
        if numbers and not spans:
            raise ValueError(f"no iterations of global batch {setup.global_batch}, only of {sorted(sizes)}: give --gbs")
        if run_of.is_dir():
            _check_recorded(run_of, setup)
        return steady(spans, warm_up)
    except ValueError as error:
        raise ValueError(f"{run_of}: {error}") from None


def _check_recorded(folder: Path, setup: Setup) -> None:
    """Raise ValueError if the run recorded another configuration; one without a recorded iteration says nothing."""
    from bpipe.record.read import has_iterations, read_run

    if not has_iterations(folder):
        return
    recorded, wanted = read_run(folder), setup.program()
    program = next(iteration.program for record in recorded.ranks for iteration in record.iterations.values())
    devices = setup.cluster.num_devices
    pairs = {
        "ranks": (program.num_ranks, wanted.num_ranks),
        "micro-batches": (program.num_microbatches, wanted.num_microbatches),
        "chunks": (program.num_chunks, wanted.num_chunks),
        "schedule": (program.schedule, wanted.schedule),
        "balance": (program.balance_name, wanted.balance_name),
        "devices": (recorded.info.world_size or devices, devices),
    }
    for name, (recorded_value, value) in pairs.items():
        if recorded_value != value:
            raise ValueError(f"the run had {name} {recorded_value}, not {value}: give the configuration that ran")
