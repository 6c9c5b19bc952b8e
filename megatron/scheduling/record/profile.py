"""Time one stage of Megatron's own model on this machine: layers, output layer and loss, and a transfer.

    python -m megatron.scheduling.record.profile <flags of pretrain_gpt.py> --profile-micro-batches 1 2 4 --profile-output FILE

`bpipe simulate` and `bpipe plan` read the file with `--profile`; `bpipe profile` writes it from their own flags. The stage
is that of one tensor-parallel rank, alone: its collectives are not timed.
"""

import argparse
import contextlib
import io
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bpipe.runtime import capture
from megatron.scheduling.hooks import upstream
from megatron.scheduling.record import one_stage
from megatron.scheduling.start import startup

_WARM_UP = 2
# First, inner and last stage. Layers are timed in the inner one, and in the last only what comes after its layers.
_INNER, _LAST, _NUM_STAGES = 1, 2, 3


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return Megatron's parser with our flags and those of this program."""
    from megatron.scheduling.options import flags

    group = flags.add_arguments(parser).add_argument_group("profile")
    group.add_argument(
        "--profile-micro-batches", type=_positive, nargs="+", default=[1, 2, 4], metavar="N", help="sizes to time"
    )
    group.add_argument(
        "--profile-layers",
        type=_positive,
        default=1,
        metavar="N",
        help="layers to time; commands that read the profile scale it to a stage's layers",
    )
    group.add_argument("--profile-repeats", type=_positive, default=5, metavar="N", help="take the median of N runs")
    group.add_argument("--profile-output", metavar="FILE", help="write to FILE instead of standard output")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _one_stage_only(args: Any) -> None:
    """Build one stage of the timed layers between two others, however the training is split."""
    args.pipeline_model_parallel_size, args.num_layers = _NUM_STAGES, _NUM_STAGES * args.profile_layers
    args.global_batch_size = None
    for name in """
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers microbatch_group_size_per_vp_stage
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout
    """.split():
        setattr(args, name, None)


def _stamp() -> Any:
    """Return a point in time, by the device's own clock if it has one."""
    if _on_cpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return float(end - start if _on_cpu() else start.elapsed_time(end) / 1e3)


def _on_cpu() -> bool:
    return torch.device(torch.cuda.current_device()).type == "cpu"


def median_seconds[T](
    repeats: int, first: Callable[[], T], second: Callable[[T], object] = lambda value: None
) -> tuple[float, float]:
    """Return the median times of two functions that run in turn, without waiting for the device in between.

    The second gets the result of the first.
    """
    stamps = []
    for _ in range(_WARM_UP + repeats):
        start = _stamp()
        value = first()
        middle = _stamp()
        second(value)
        stamps.append((start, middle, _stamp()))
    torch.cuda.synchronize()
    timed = [(_seconds(start, middle), _seconds(middle, end)) for start, middle, end in stamps[_WARM_UP:]]
    return statistics.median(seconds for seconds, _ in timed), statistics.median(seconds for _, seconds in timed)


def measure(args: Any) -> list[dict[str, float | int]]:
    """Return an entry for each micro-batch size, without `transfer_s` if there is no second device.

    Gradients are not reduced, as for all but an iteration's last micro-batch.
    """
    entries: list[dict[str, float | int]] = []
    with one_stage.chunks(args, _INNER) as (model,), model.no_sync():
        for micro_batch in args.profile_micro_batches:
            runner = one_stage.Runner(args, model, micro_batch)
            output = runner.forward()
            storages = capture.find([output.grad_fn], runner.inputs, output.device)
            saved = sum(storage.nbytes for storage in storages if storage.alone)
            del output, storages
            times = median_seconds(args.profile_repeats, runner.forward, runner.backward)
            entry: dict[str, float | int] = {"micro_batch": micro_batch, "layers": args.profile_layers}
            entry |= {"forward_s": times[0], "backward_s": times[1], "saved_bytes": saved}
            entries.append(entry | _transfer(saved, args.profile_repeats))
    with one_stage.chunks(args, _LAST) as (model,), model.no_sync():
        for entry, micro_batch in zip(entries, args.profile_micro_batches, strict=True):
            runner = one_stage.Runner(args, model, micro_batch)
            entry["output_s"] = sum(median_seconds(args.profile_repeats, runner.after_layers, runner.backward))
    return entries


def _transfer(num_bytes: int, repeats: int) -> dict[str, float]:
    """Time a copy to a second GPU, or in the CPU's memory; a single GPU has nowhere to copy to."""
    own = torch.device(torch.cuda.current_device())
    if own.type == "cuda" and torch.cuda.device_count() < 2:
        return {}
    other = own if own.type == "cpu" else torch.device("cuda", (own.index + 1) % torch.cuda.device_count())
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for device in (own, other))
    return {"transfer_s": median_seconds(repeats, lambda: target.copy_(source))[0]}


def described(args: Any) -> dict[str, Any]:
    """Return facts of the measurement."""
    facts = {
        "device": "cpu" if _on_cpu() else torch.cuda.get_device_name(),
        **one_stage.measured(args),
        "recompute": args.recompute_granularity or "none",
        "torch": torch.__version__,
        "megatron": upstream.running().release,
    }
    attention = "unfused" if args.transformer_impl == "local" else _backend(args)
    # If Transformer Engine chooses the attention itself, the choice is unknown.
    return facts | ({"attention": attention} if attention in ("flash", "unfused") else {})


def _backend(args: Any) -> str:
    return str(getattr(args.attention_backend, "name", args.attention_backend))


def main(flags: Sequence[str]) -> None:
    """Time the stages and print a profile. Raises ValueError for what cannot be timed here."""
    # Megatron's warnings of missing packages and of its own future would bury the few lines that matter.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        startup.prepare()
        with one_stage.refusing("Megatron refuses these flags"):
            args = one_stage.parse(flags, add_arguments, _one_stage_only)
        if _backend(args) == "flash" and args.transformer_impl == "local":
            raise ValueError("flash attention needs a GPU and Transformer Engine: use --attention unfused here")
        entries = measure(args)
    for entry in entries:
        print(
            f"micro-batch {entry['micro_batch']}: {entry['forward_s']:.4f} s forward, {entry['backward_s']:.4f} s "
            f"backward",
            file=sys.stderr,
        )
    text = json.dumps({"stages": entries, "measured": described(args)}, indent=1) + "\n"
    if args.profile_output is None:
        print(text, end="")
    else:
        Path(args.profile_output).write_text(text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"bpipe: error: {error}", file=sys.stderr)
        sys.exit(2)
