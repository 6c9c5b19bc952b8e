"""`bpipe estimate`: the gain of a larger micro-batch from stage MFUs alone. In: flags. Out: a few lines or JSON."""

from __future__ import annotations

from dataclasses import replace

from bpipe.commands.shared import print_json
from bpipe.config.flags import outputs
from bpipe.config.flags.flag import Command, Group, Options, Task
from bpipe.config.flags.schedules import GLOBAL_BATCH, PIPELINE
from bpipe.plan.estimate import estimate, iteration_seconds, verdict

COMMAND = Command(
    (
        Group(
            "",
            (
                replace(GLOBAL_BATCH, required=True, help="sequences per iteration of one replica"),
                replace(PIPELINE, required=True),
                outputs.TWO_SIZES,
                outputs.STAGE_MFU,
                outputs.STAGE_SECONDS,
                outputs.FORMAT,
            ),
        ),
    ),
    (
        Task(
            "estimate the gain of a larger micro-batch",
            "bpipe estimate --gbs 128 --pp 8 --mbs 1 2 --stage-mfu 37.8 55.2",
            ("global_batch", "pipeline", "micro_batch", "stage_mfu", "stage_seconds"),
        ),
    ),
)


def run(options: Options) -> None:
    share = next((value for value in options.stage_mfu if 0 < value < 1), None)
    if share is not None:
        raise ValueError(f"--stage-mfu {share:g} is less than 1 %: it is in percent, so give {100 * share:g}")
    y, x = options.micro_batch
    stage_y, stage_x = (value / 100 for value in options.stage_mfu)
    result = estimate(options.global_batch, options.pipeline, x, y, stage_x, stage_y)
    text = verdict(result, x, y, stage_x, stage_y)
    iterations = [
        iteration_seconds(options.global_batch, options.pipeline, size, stage)
        for size, stage in zip((y, x), options.stage_seconds or (), strict=False)
    ]
    if options.format == "json":
        rows = [(y, stage_y, result.mfu_y, result.bubble_y), (x, stage_x, result.mfu_x, result.bubble_x)]
        print_json(
            {
                "gain": result.ratio,
                "verdict": text,
                "sizes": [
                    {
                        "micro_batch": size,
                        "stage_mfu_percent": 100 * stage,
                        "mfu_percent": 100 * whole,
                        "bubble_percent": 100 * bubble,
                        "iteration_time_s": iterations[index] if iterations else None,
                    }
                    for index, (size, stage, whole, bubble) in enumerate(rows)
                ],
            }
        )
        return
    for index, (size, whole) in enumerate(((y, result.mfu_y), (x, result.mfu_x))):
        print(
            f"micro-batch {size}: whole model MFU {100 * whole:.1f} %"
            + (f", iteration {iterations[index]:.3f} s" if iterations else "")
        )
    print(text)
