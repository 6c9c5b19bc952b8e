"""One rank of a test's trainings: several cases in one process, because importing torch is the expensive part.

Takes a file of cases (name, arguments) and a folder. Writes to `<folder>/<case>.rank<r>.json` Megatron's exact values
of each iteration, and a hash of the final weights. The recorder wraps `train_step` and replaces nothing of the
schedule. Further arguments (`options`) select another recorder and stand-ins for what this machine lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import inspect
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretrain_gpt  # before Megatron: it readies the process

# isort: split
import torch
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import training

LAUNCH_RANK = os.environ["RANK"]
# With Megatron's own number of documents, shuffling three million samples would take a quarter of each case.
MockGPTLowLevelDataset.size = 10_000


class Recorder:
    """Records one run: exact losses and gradient norms, evaluations, and the final weights."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, str]] = []
        self.model: list[torch.nn.Module] = []
        self._originals = {
            name: getattr(training, name) for name in ("train_step", "evaluate", "setup_model_and_optimizer")
        }
        training.train_step = self._observe(training.train_step)
        training.evaluate = self._evaluated(training.evaluate)
        training.setup_model_and_optimizer = self._keep_model(training.setup_model_and_optimizer)

    def remove(self) -> None:
        for name, original in self._originals.items():
            setattr(training, name, original)

    def _observe(self, train_step: Any) -> Any:
        signature = inspect.signature(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = train_step(*args, **kwargs)
            losses = {name: float(value).hex() for name, value in result[0].items()}
            iteration = signature.bind(*args, **kwargs).arguments["iteration"] + 1
            norm = None if result[5] is None else float(result[5]).hex()
            self.iterations.append({"iteration": iteration, "grad_norm": norm, "skipped": result[1], **losses})
            return result

        return step

    def _evaluated(self, evaluate: Any) -> Any:
        @functools.wraps(evaluate)
        def observed(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            self.evaluations.append({name: float(value).hex() for name, value in (result[0] or {}).items()})
            return result

        return observed

    def _keep_model(self, setup: Any) -> Any:
        @functools.wraps(setup)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            self.model = result[0]
            return result

        return wrapped

    def weights(self) -> Any:
        digest = hashlib.sha256()
        for chunk in self.model:
            for name, parameter in sorted(chunk.named_parameters()):
                digest.update(name.encode())
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def meet(path: Path) -> torch.distributed.TCPStore | None:
    """Let the ranks of the next case find each other by a store on the first rank, like torchrun's agent; return it.

    Its port, chosen by the system, is written to a file. It listens before that, because a rank that connects to a
    missing store would wait half a second.
    """
    store = None
    if LAUNCH_RANK == "0":
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        partial = path.with_suffix(".partial")
        partial.write_text(str(store.port))
        partial.replace(path)
    deadline = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first rank never wrote {path}")
        time.sleep(0.01)
    os.environ.update(MASTER_PORT=path.read_text(), TORCHELASTIC_USE_AGENT_STORE="True")
    return store


def run(
    case: dict[str, Any],
    folder: Path,
    observer: Callable[[], Recorder] = Recorder,
    main: Callable[[], object] = pretrain_gpt.main,
) -> None:
    """Train once, with our script or another one, and write the record."""
    # A placement gives this process another rank for one run; the next one starts from the launcher's rank again.
    os.environ["RANK"] = LAUNCH_RANK
    store = meet(folder / f"{case['name']}.port")
    sys.argv = ["pretrain_gpt.py", *case["arguments"]]
    print(f"=== {case['name']}", flush=True)
    recorder = observer()
    try:
        main()
        rank = torch.distributed.get_rank()
        record = {"iterations": recorder.iterations, "evaluations": recorder.evaluations, "weights": recorder.weights()}
        (folder / f"{case['name']}.rank{rank}.json").write_text(json.dumps(record))
    finally:
        recorder.remove()
    del recorder
    training.destroy_global_state()
    # These trackers keep the number of layers of their first case.
    MTPLossLoggingHelper.tracker.clear()
    destroy_moe_metrics_tracker()
    # With this class attribute, the next case would replay this one's graph.
    FullCudaGraphWrapper.reset_cuda_graph(FullCudaGraphWrapper)
    StaticBufferLoader.static_buffers = {"training": [], "validation": []}
    torch.distributed.destroy_process_group()
    del store
    gc.collect()


def cases_of(path: str) -> list[dict[str, Any]]:
    """Return the cases of a file. Call it before the first case, while this process has one thread.

    If a case saves, this creates Megatron's writer queue by a fork: by default every rank starts a process that imports
    torch again, which takes longer than the cases.
    """
    cases: list[dict[str, Any]] = json.loads(Path(path).read_text())
    if any("--save" in case["arguments"] for case in cases):
        get_write_results_queue("fork")
    return cases


def options() -> argparse.ArgumentParser:
    """Return the parser of a case's flags, which Megatron does not see."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--named", action="store_true", help="weights are drawn and compared by name")
    parser.add_argument("--tensors", action="store_true", help="tensors are kept, and not only hashes of them")
    parser.add_argument("--peak", action="store_true", help="the memory of the process is recorded in place of weights")
    parser.add_argument("--gradients", action="store_true", help="with --named: keep those of the first iteration")
    parser.add_argument("--seeded", action="store_true", help="dropout follows from iteration, micro-batch and stage")
    parser.add_argument("--exact-sums", action="store_true", help="sums do not depend on the order of the ranks")
    parser.add_argument("--one-pipes-samples", action="store_true", help="both pipes read the samples of the first")
    parser.add_argument("--script", help="the script of this folder that trains in place of pretrain_gpt.py")
    parser.add_argument("--differing", help="how micro-batches differ in size, see differing.py")
    parser.add_argument("--stand-in", nargs="*", default=[], help="contexts of stand_ins.py")
    return parser


def train(case: dict[str, Any], folder: Path) -> None:
    """Run a case with its options."""
    from tests.gloo import conversations, differing, recorders, stand_ins

    chosen, case["arguments"] = options().parse_known_args(case["arguments"])
    main = pretrain_gpt.main
    if chosen.script:
        script = str(Path(__file__).parent / chosen.script)
        main = functools.partial(runpy.run_path, script, run_name="__main__")
    elif chosen.differing:
        main = functools.partial(differing.train, chosen.differing)
    if {"--data-path", "--sft"} & set(case["arguments"]):
        case["arguments"].remove("--mock-data")
    with contextlib.ExitStack() as stack:
        for name in chosen.stand_in:
            stack.enter_context(stand_ins.STAND_INS[name](folder, case["name"]))
        if "--sft" in case["arguments"]:
            stack.enter_context(conversations.readable())
        for patch in recorders.patches(chosen):
            stack.enter_context(patch)
        run(case, folder, recorders.kind(chosen, folder / case["name"]), main)


def main(cases: str, folder: str) -> None:
    torch.set_num_threads(1)
    for case in cases_of(cases):
        train(case, Path(folder))


if __name__ == "__main__":
    # Use the instance that `recorders` imports, too.
    from tests.gloo import worker

    worker.main(*sys.argv[1:])
