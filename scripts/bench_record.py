"""Measure what the record of a run costs: iterations of one stage with and without it, taking turns in one process.

In: sizes. Out: a table, and JSON with --json: the median of each variant, and the ratio of its processor time to the engine alone's, with
quartiles: what a record costs is work of this process, and its processor time is less noisy than the clock on a machine that is shared.
The stage is the first of a pipeline, its activations go to host memory, so that everything a record notes takes place; its neighbours
are not there, so an iteration is computation and transfers alone, and a cost shows as large as it can be.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from bpipe.ir.action import Kind
from bpipe.passes.steps import steps
from bpipe.program import ProgramConfig, build
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.streams import Clock, lanes, synchronize
from bpipe.transport.one_sided import Host, Reaching

VARIANTS = {"engine alone": (False, False), "with peaks": (True, False), "with peaks and record": (True, True)}


def iteration(engine: Engine, model: torch.nn.Module, inputs: torch.Tensor) -> None:
    """What a pipeline loop does on the first stage."""
    outputs: dict[int, torch.Tensor] = {}
    engine.begin()
    for step in steps(engine.schedule, 0)[1:]:
        op = step.compute
        assert op is not None
        engine.before(op)
        if op.kind is Kind.FORWARD:
            received = inputs.clone().requires_grad_()
            outputs[op.microbatch] = model(received)
            engine.after(op, [outputs[op.microbatch]], [received])
        else:
            output = outputs.pop(op.microbatch)
            output.backward(torch.ones_like(output))
            engine.after(op)
    engine.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    schedule = build(ProgramConfig("1f1b", arguments.stages, arguments.microbatches, balance="bpipe"))
    layer = torch.nn.TransformerEncoderLayer(arguments.hidden, 8, 4 * arguments.hidden, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False).to(device)
    inputs = torch.randn(1, arguments.sequence, arguments.hidden, device=device)
    out, home = lanes(device, 60.0)
    config = EngineConfig("rank 0", device, minimum_bytes=65536, timeout_s=60.0)
    engines = {
        name: Engine(schedule, 0, Reaching(Host(pinned=device.type == "cuda"), out, home), config, Meter() if metered else None)
        for name, (metered, _) in VARIANTS.items()
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for turn in range(arguments.rounds + 1):
        for name, engine in engines.items():
            recorder = engine.recorder = Recorder(Clock(device)) if VARIANTS[name][1] else None
            begin, worked = time.perf_counter(), time.process_time()
            iteration(engine, model, inputs)
            if recorder is not None:
                recorder.rows({}, {})
            synchronize(device)
            if turn:
                # The first round allocates.
                seconds[name].append((time.perf_counter() - begin, time.process_time() - worked))
    for lane in (out, home):
        lane.close()
    alone = seconds["engine alone"]
    computations = 2 * arguments.microbatches
    found = {
        name: {
            "median_s": statistics.median(clock for clock, _ in times),
            "extra_us": statistics.median(1e6 * (mine - base) / computations for (_, mine), (_, base) in zip(times, alone, strict=True)),
            "ratio": statistics.quantiles([mine / base for (_, mine), (_, base) in zip(times, alone, strict=True)], n=4),
        }
        for name, times in seconds.items()
    }
    print(f"{device}, torch {torch.__version__}, {platform.processor() or platform.machine()}; {arguments.rounds} rounds")
    print(f"{'':<22} {'iteration, ms':>13} {'extra us a computation':>22}  processor time to the engine alone's: median (quartiles)")
    for name, row in found.items():
        low, middle, high = row["ratio"]
        print(f"{name:<22} {1e3 * row['median_s']:>13.1f} {row['extra_us']:>22.0f}  {middle:.4f} ({low:.4f} to {high:.4f})")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
