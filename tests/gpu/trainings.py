"""Megatron's trainer with all ranks on one device: trainings are compared with one another, to the last bit.

Needs megatron-core and pytest, for some groups also Transformer Engine, and is skipped without them. Reports for each
training whether its results equal those that it is compared with, and for the group `true_size` also whether its memory
is as predicted and whether balancing cures an out of memory. On a GPU the ranks share it (--bpipe-share-gpus), with
real NCCL through loopback sockets. As a program it is a rank: `python tests/gpu/trainings.py DEVICE CASES FOLDER`.
"""

import functools
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.accelerators import CUDA, LATE, Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, Spread

LIMIT = "limit_bytes"
# Allowed relative differences between losses if sums are split: in 16 bits, and in 32.
NEAR = {CUDA: 2e-3, LATE: 1e-5}
# Without these, a GPU may sum the same numbers in another order each time.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
COMMON = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 8191 --split 949,50,1 --eval-iters 0 --eval-interval 1000
    --log-interval 1 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --distributed-timeout-minutes 2
"""
OWN_LAYERS = """
    --bf16 --deterministic-mode --bpipe-share-gpus --transformer-impl local --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion
"""
ENGINE_LAYERS = """
    --bf16 --deterministic-mode --bpipe-share-gpus --transformer-impl transformer_engine
    --no-gradient-accumulation-fusion
"""
LLAMA = """
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
"""
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0 --clip-grad 0"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
BALANCED = "--bpipe --bpipe-timeout 60"
# Load only weights: with another placement, the optimizer state is on another rank.
BEGUN = "--load {folder}/begun --finetune --no-load-rng"
BEGIN = "begun"
# Two eager iterations, then one that is captured and replayed for the rest.
CAPTURED = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2"
CURE = "two micro-batches, others in CPU memory"
EXACT, LOSSES, ROUNDED = "identical", "losses identical", "losses equal but for rounding"


@dataclass(frozen=True)
class Training:
    """One training, and the training that it is compared with.

    Attributes:
        flags: Megatron's, after those of its group; `{folder}` is the folder of its launch.
        against: Name of an earlier training of the group; empty for none.
        how: `EXACT` (losses, norms and weights of every rank), `LOSSES` or `ROUNDED`.
    """

    flags: str = ""
    against: str = ""
    how: str = EXACT


@dataclass(frozen=True)
class Group:
    """Trainings of one launch, in their order.

    Attributes:
        engine: Whether its layers are Transformer Engine's on a GPU.
        shape: Layers, width, heads, tokens and global batch on a GPU.
        small: The same on late devices.
    """

    trainings: Mapping[str, Training]
    shape: tuple[int, int, int, int, int] = (8, 1024, 16, 1024, 8)
    small: tuple[int, int, int, int, int] = (4, 64, 4, 64, 16)
    world: int = 4
    engine: bool = False
    flags: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def over(transport: str, flags: str = "") -> str:
    return f"{BALANCED} --bpipe-transport {transport} {flags}"


GROUPS: Mapping[str, Group] = {
    "trainer": Group(
        {
            "stock": Training(),
            "nccl": Training(over("nccl"), "stock"),
            "peer": Training(over("peer"), "stock"),
            "host": Training(over("host"), "stock"),
            "verified": Training(over("auto", "--bpipe-verify all"), "stock"),
        }
    ),
    "trainer_te": Group(
        {
            "stock": Training(),
            "nccl": Training(over("nccl"), "stock"),
            "peer": Training(over("peer"), "stock"),
            "zb-h1": Training(over("peer", "--bpipe-schedule zb-h1"), "stock"),
            "fp8": Training("--fp8-format hybrid --fp8-recipe tensorwise"),
            "fp8_peer": Training(over("peer", "--fp8-format hybrid --fp8-recipe tensorwise"), "fp8"),
        },
        engine=True,
    ),
    "trainer_8": Group(
        {"stock": Training(), "nccl": Training(over("nccl"), "stock")},
        shape=(8, 512, 8, 512, 32),
        small=(8, 64, 4, 64, 32),
        world=8,
    ),
    "schedules": Group(
        {
            BEGIN: Training("--train-iters 1 --save {folder}/begun --save-interval 1"),
            "stock": Training(BEGUN),
            "v-half": Training(f"{BEGUN} {over('nccl', '--bpipe-schedule v-half')}", "stock", LOSSES),
            "chimera": Training(f"{BEGUN} {BALANCED} --bpipe-schedule chimera", "stock", ROUNDED),
            "vocabulary 1": Training(f"{BEGUN} {over('nccl', '--bpipe-vocabulary 1')}", "stock", ROUNDED),
            "vocabulary 2": Training(f"{BEGUN} {over('nccl', '--bpipe-vocabulary 2')}", "stock", ROUNDED),
            "slices": Training(f"{BEGUN} {over('peer', '--bpipe-slices 4')}", "stock", ROUNDED),
            "CPU memory": Training(f"{BEGUN} {BALANCED} --bpipe-hosts host --bpipe-bound 2", "stock"),
            "interleaved": Training(CHUNKS),
            "interleaved_nccl": Training(f"{CHUNKS} {over('nccl')}", "interleaved"),
            "grouped": Training(f"{CHUNKS} {over('nccl', '--bpipe-schedule grouped-interleaved')}", "interleaved"),
        },
        small=(8, 64, 4, 64, 16),
        flags=NO_DROPOUT,
    ),
    "captured": Group(
        {
            BEGIN: Training("--train-iters 1 --save {folder}/begun --save-interval 1"),
            "stock": Training(BEGUN),
            "peer": Training(f"{BEGUN} {CAPTURED} {over('peer')}", "stock"),
            "host": Training(f"{BEGUN} {CAPTURED} {over('host')}", "stock"),
            "nccl": Training(f"{BEGUN} {CAPTURED} {over('nccl')}", "stock"),
            "v-half": Training(f"{BEGUN} {CAPTURED} {over('peer', '--bpipe-schedule v-half')}", "stock", LOSSES),
            "interleaved": Training(CHUNKS),
            "interleaved captured": Training(f"{CHUNKS} {CAPTURED}", "interleaved"),
            "interleaved peer": Training(f"{CHUNKS} {CAPTURED} {over('peer')}", "interleaved"),
        },
        small=(8, 64, 4, 64, 16),
        flags=f"{NO_DROPOUT} --no-check-for-nan-in-loss-and-grad --train-iters 6",
    ),
    "true_size": Group(
        {
            "stock": Training("--bpipe-report {folder}/report-stock"),
            "peer": Training(over("peer", "--bpipe-report {folder}/report-peer"), "stock"),
            CURE: Training(f"{BALANCED} --bpipe-hosts host --bpipe-bound 2", "stock"),
        },
        shape=(8, 4096, 32, 4096, 16),
        small=(4, 64, 4, 512, 16),
        flags=f"{LLAMA} --vocab-size 32767 --train-iters 4",
    ),
}


@dataclass(frozen=True)
class Sizes:
    """Whether the trainings are small."""

    small: bool


SIZES = {FULL: Sizes(small=False), MODERATE: Sizes(small=True), SMALL: Sizes(small=True)}


def run(on: Accelerator, sizes: Sizes, until: float, name: str) -> Result:
    group = GROUPS[name]
    missing = [
        package
        for package in ("megatron.core", "pytest", *(["transformer_engine"] if group.engine else []))
        if not _is_there(package)
    ]
    if missing:
        return Result(skipped=f"{', '.join(missing)} is not installed here")
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(on, group, sizes, Path(folder), until)
        rest = dict(group.trainings)
        if BEGIN in rest and on.name == LATE:
            # A late device has no pinned memory for a checkpoint.
            launch.train({BEGIN: rest.pop(BEGIN)}, device="cpu")
        launch.train(rest)
        for training, comparison in group.trainings.items():
            launch.compare(training, comparison, result)
        if name == "true_size":
            launch.judge_memory(result)
        if name == "captured":
            launch.measure_captures(result)
    return result


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True)
class Launch:
    """The processes of one group on one device, and their files in a folder."""

    on: Accelerator
    group: Group
    sizes: Sizes
    folder: Path
    until: float

    def flags(self, training: Training) -> list[str]:
        layers, width, heads, tokens, batch = self.group.small if self.sizes.small else self.group.shape
        shape = (
            f"--num-layers {layers} --hidden-size {width} --num-attention-heads {heads} --seq-length {tokens} "
            f"--max-position-embeddings {tokens} --micro-batch-size {2 if self.sizes.small else 1} "
            f"--global-batch-size {batch} --pipeline-model-parallel-size {self.group.world} --train-iters 3"
        )
        device = (ENGINE_LAYERS if self.group.engine else OWN_LAYERS) if self.on.name == CUDA else ""
        small = "--vocab-size 127" if self.sizes.small else ""
        moved = "--bpipe-min-bytes 1024" if self.sizes.small and "--bpipe " in f"{training.flags} " else ""
        flags = f"{COMMON} {shape} {device} {self.group.flags} {small} {moved} {training.flags}"
        return [flag.format(folder=self.folder) for flag in flags.split()]

    def train(
        self,
        trainings: Mapping[str, Training],
        limit_bytes: int | None = None,
        suffix: str = "",
        device: str | None = None,
    ) -> None:
        """Run trainings in one set of processes, in which each rank may use `limit_bytes` of its device."""
        from tests.gloo.conftest import PARENTS, finish, start
        from tests.gloo.ports import free_ports
        from tests.late.training import LATE_PARENTS, close_parents

        cases = [
            {"name": name + suffix, "arguments": self.flags(training), LIMIT: limit_bytes}
            for name, training in trainings.items()
        ]
        (self.folder / "cases.json").write_text(json.dumps(cases))
        script = [
            str(Path(__file__).resolve()),
            device or self.on.name,
            str(self.folder / "cases.json"),
            str(self.folder),
        ]
        world, is_gpu = self.group.world, self.on.name == CUDA
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", **DETERMINISTIC}
        if is_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        left_s = max(self.until - time.monotonic(), 1.0)
        try:
            cold = world if is_gpu else 0
            parents = PARENTS if device else LATE_PARENTS
            ranks = start(world, script, self.folder, free_ports(1)[0], environment, cold, parents)
            # If a launch is to run out of memory, only its first rank ends by itself.
            outcome = finish(ranks, self.folder, left_s, 0 if limit_bytes and suffix == STOCK_LIMITED else None)
            (self.folder / f"log{suffix}.txt").write_text("".join(outcome.logs))
        finally:
            close_parents()

    def records(self, name: str) -> list[dict[str, Any]] | None:
        """Return every rank's record of a training, or None if it did not finish."""
        files = [self.folder / f"{name}.rank{rank}.json" for rank in range(self.group.world)]
        return [json.loads(file.read_text()) for file in files] if all(map(Path.exists, files)) else None

    def compare(self, name: str, training: Training, result: Result, suffix: str = "") -> None:
        records = self.records(name + suffix)
        if records is None:
            result.check(name + suffix, False, f"did not end: {self.last_error(suffix)}")
            return
        losses = losses_of(records)
        shown = ", ".join(f"{loss:.6f}" for loss in losses)
        against = self.records(training.against) if training.against else None
        if against is None:
            result.check(name + suffix, len(set(losses)) == len(losses) > 0, f"trains, losses {shown}")
            return
        text, expected = f"{training.how} with {training.against}", losses_of(against)
        if training.how == EXACT:
            right = records == against
        elif training.how == LOSSES:
            right = losses == expected
        else:
            off = max(abs(loss / stock_loss - 1) for loss, stock_loss in zip(losses, expected, strict=True))
            right, text = off <= NEAR[self.on.name], f"{text} (at most {off:.1e} apart)"
        result.check(name + suffix, right, text if right else f"NOT {text}: losses {shown}")

    def last_error(self, suffix: str) -> str:
        lines = (self.folder / f"log{suffix}.txt").read_text().splitlines()
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it said nothing"])[-1].strip()[:200]

    def peaks(self, name: str) -> tuple[int, int]:
        """Return the most bytes allocated and reserved by torch on the fullest rank, from the second iteration on."""
        files = [self.folder / f"{name}.memory{rank}.json" for rank in range(self.group.world)]
        pairs = [pair for file in files for pair in json.loads(file.read_text())[1:]]
        return max(allocated for allocated, _ in pairs), max(reserved for _, reserved in pairs)

    def measure_captures(self, result: Result) -> None:
        """Report torch's reserved memory and the time of replays, with and without transfers in their graphs."""
        for name in ("interleaved", "interleaved captured", "interleaved peer"):
            if self.records(name) is not None:
                _, reserved = self.peaks(name)
                result.row(f"{name}: fullest rank, MiB reserved", f"{reserved / 2**20:.1f}")
                result.row(f"{name}: seconds a step, from the fourth on", Spread.of(self.steps_s(name)[3:]).text())

    def steps_s(self, name: str) -> list[float]:
        """Return the seconds of each step on the slowest rank."""
        files = [self.folder / f"{name}.seconds{rank}.json" for rank in range(self.group.world)]
        return [max(steps) for steps in zip(*(json.loads(file.read_text()) for file in files), strict=True)]

    def judge_memory(self, result: Result) -> None:
        """Check recorded peaks of activations against the schedule, then cure an out of memory by balancing."""
        from bpipe.record.report.report import report_of

        for name in ("stock", "peer"):
            stages = report_of(self.folder / f"report-{name}").stages
            off = [(stage.measured_bytes or 0) - (stage.predicted_bytes or 0) for stage in stages]
            text = " ".join(f"{(stage.measured_bytes or 0) / 2**20:.1f}" for stage in stages)
            result.check(f"{name}: activations, MiB", not any(off), f"{text}; off by {off} B")
        (needed, _), (balanced, reserved) = self.peaks("stock"), self.peaks(CURE)
        sizes = f"{needed / 2**20:.1f}; with {CURE} {balanced / 2**20:.1f} ({reserved / 2**20:.1f} reserved)"
        result.row("fullest rank, MiB", sizes)
        # Less than stock needs; the difference is for gaps that the allocator cannot fill.
        limit = needed - (needed - balanced) // 8
        trainings = self.group.trainings
        self.train({"stock": trainings["stock"]}, limit, STOCK_LIMITED)
        printed = (self.folder / f"log{STOCK_LIMITED}.txt").read_text()
        ended = self.records("stock" + STOCK_LIMITED) is None and "OutOfMemoryError" in printed
        result.check(f"stock in {limit >> 20} MiB", ended, "runs out of memory" if ended else "does NOT")
        self.train({CURE: trainings[CURE]}, limit, BALANCED_LIMITED)
        self.compare(CURE, trainings[CURE], result, BALANCED_LIMITED)


STOCK_LIMITED, BALANCED_LIMITED = " (limited)", " in the same memory"


def losses_of(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the loss of every iteration, from the rank that has it."""
    for record in records:
        losses = [float.fromhex(step["lm loss"]) for step in record["iterations"] if "lm loss" in step]
        if losses:
            return losses
    return []


# -- a rank
# ----------------------------------------------------------------------------------------------------------------------


def main(device: str, cases: str, folder: str) -> None:
    if device == LATE:
        from tests.late import stand_in

        # A forked process has already done this.
        if "megatron" not in sys.modules:
            stand_in.install()
    import torch

    from tests.gloo import worker

    class Recorder(worker.Recorder):
        """Writes the most bytes that torch allocated and reserved in each iteration, and its seconds."""

        def _observe(self, train_step: Any) -> Any:
            observed = super()._observe(train_step)
            peaks: list[tuple[int, int]] = []
            seconds: list[float] = []

            @functools.wraps(train_step)
            def step(*args: Any, **kwargs: Any) -> Any:
                if device == "cpu":
                    return observed(*args, **kwargs)
                torch.accelerator.reset_peak_memory_stats()
                begin_s = time.perf_counter()
                stepped = observed(*args, **kwargs)
                torch.accelerator.synchronize()
                seconds.append(time.perf_counter() - begin_s)
                (Path(folder) / f"{case['name']}.seconds{torch.distributed.get_rank()}.json").write_text(
                    json.dumps(seconds)
                )
                peaks.append((torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()))
                file = Path(folder) / f"{case['name']}.memory{torch.distributed.get_rank()}.json"
                file.write_text(json.dumps(peaks))
                return stepped

            return step

    torch.set_num_threads(1)
    for case in worker.cases_of(cases):
        _begin(device, case[LIMIT])
        worker.run(case, Path(folder), Recorder)
        if device != "cpu":
            torch.accelerator.empty_cache()


def _begin(device: str, limit_bytes: int | None) -> None:
    """Prepare this rank's device, and limit the memory that it may use."""
    import torch

    rank = int(os.environ["LOCAL_RANK"])
    if device == LATE:
        from megatron.scheduling import cpu as cpu_runtime
        from tests.late.devices import Draw, extension
        from tests.late.processes import begin_process
        from tests.late.worker import on_device

        cpu_runtime.ARGUMENTS = on_device(cpu_runtime.ARGUMENTS)
        begin_process(rank, rank, Draw(1))
        if limit_bytes is not None:
            extension().limit(limit_bytes)
    elif device == CUDA:
        index = rank % torch.cuda.device_count()
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0) if limit_bytes else 1.0, index)


if __name__ == "__main__":
    main(*sys.argv[1:])
