"""`bpipe estimate`: the gain of a larger micro-batch from stage MFUs alone."""

from dataclasses import replace

from bpipe.commands.terminal import print_json, table, tell
from bpipe.config.flags import outputs
from bpipe.config.flags.flag import Options, Task, command, group
from bpipe.config.flags.schedules import GLOBAL_BATCH, PIPELINE
from bpipe.plan.estimate import estimate, iteration_seconds, verdict

COMMAND = command(
    group(
        "",
        replace(GLOBAL_BATCH, required=True, help="sequences per iteration of one replica"),
        replace(PIPELINE, required=True),
        outputs.TWO_SIZES,
        outputs.STAGE_MFU,
        outputs.STAGE_SECONDS,
        outputs.FORMAT,
    ),
    Task(
        "estimate the gain of a larger micro-batch",
        "bpipe estimate --gbs 128 --pp 8 --mbs 1 2 --stage-mfu 37.8 55.2",
        "global_batch pipeline micro_batch stage_mfu stage_seconds",
    ),
)


def run(options: Options) -> None:
    share = next((value for value in options.stage_mfu if 0 < value < 1), None)
    if share is not None:
        raise ValueError(f"--stage-mfu {share:g} is less than 1 %: it is in percent, so give {100 * share:g}")
    y, x = options.micro_batch
    stage_y, stage_x = (value / 100 for value in options.stage_mfu)
    result = estimate(options.global_batch, options.pipeline, x, y, stage_x, stage_y)
    seconds_y, seconds_x = options.stage_seconds or (None, None)
    text = verdict(result, x, y, stage_x, stage_y)
    rows = (
        {
            "micro_batch": size,
            "stage_mfu_percent": 100 * stage,
            "mfu_percent": 100 * whole,
            "bubble_percent": 100 * bubble,
            "iteration_time_s": seconds and iteration_seconds(options.global_batch, options.pipeline, size, seconds),
        }
        for size, stage, whole, bubble, seconds in (
            (y, stage_y, result.mfu_y, result.bubble_y, seconds_y),
            (x, stage_x, result.mfu_x, result.bubble_x, seconds_x),
        )
    )
    if options.format == "json":
        print_json({"gain": result.ratio, "verdict": text, "sizes": list(rows)})
        return
    decimals = {"micro_batch": 0, "stage_mfu_percent": 1, "mfu_percent": 1, "bubble_percent": 1, "iteration_time_s": 3}
    shown = [["" if row[key] is None else f"{row[key]:.{digits}f}" for key, digits in decimals.items()] for row in rows]
    tell(table(("micro-batch", "stage MFU %", "MFU %", "bubble %", "iteration s"), shown), text)
