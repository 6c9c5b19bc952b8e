"""`bpipe profile`: time one stage of a model on this machine's device. In: flags. Out: JSON that `--profile` of other commands reads."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bpipe.commands.flags import add_model_arguments, model_of
from bpipe.models.layout import ATTENTION, PRECISIONS, RECOMPUTE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument_group("stage").add_argument
    add("--tensor", type=int, default=1, metavar="T", help="time one rank of this tensor parallelism, without its collectives (default 1)")
    add("--micro-batch", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="sizes to time (default 1 2 4)")
    add("--layers", type=int, default=1, metavar="N", help="layers to time; readers scale to a stage's own number (default 1)")
    add("--recompute", choices=RECOMPUTE, default="none", help="default none")
    add("--attention", choices=ATTENTION, default="flash", help="default flash")
    add("--precision", choices=PRECISIONS, default="bf16", help="default bf16")
    add("--device", help="a torch device (default: cuda where there is one, else cpu)")
    add("--repeats", type=int, default=5, metavar="N", help="the median of N runs counts (default 5)")
    add("--output", metavar="FILE", help="write there instead of to standard output")


def run(options: argparse.Namespace) -> None:
    import torch

    from bpipe.measure.stage import Case, measure

    model = model_of(options)
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device {options.device}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device, leave it out or say cpu")
    stages: list[dict[str, Any]] = []
    for micro_batch in options.micro_batch:
        case = Case(
            model,
            micro_batch,
            options.layers,
            options.tensor,
            options.recompute,
            options.attention,
            options.precision,
            device,
            options.repeats,
        )
        stages.append(measure(case))
        print(
            f"micro-batch {micro_batch}: {stages[-1]['forward_s']:.4f} s forward, {stages[-1]['backward_s']:.4f} s backward",
            file=sys.stderr,
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    measured = {"device": name, "model": model.name, "sequence": model.sequence, "tensor": options.tensor, "recompute": options.recompute}
    measured |= {"attention": options.attention, "precision": options.precision, "torch": torch.__version__}
    text = json.dumps({"stages": stages, "measured": measured}, indent=1) + "\n"
    if options.output is None:
        print(text, end="")
    else:
        Path(options.output).write_text(text)
