"""List the commands whose outputs are compared.

In: the folder of files that they read. Out: cases, always the same, in the same order.

A case is one configuration; its runs ask for it in every format. Names flags of the command and nothing else of bpipe:
the two sides may be laid out differently. What a run writes goes to out/, what it reads comes from in/, both beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FORMATS = ("grid", "csv", "json", "runtime", "svg")
CHUNKED = "interleaved-1f1b"
PRESETS = ("gpt3-13b", "gpt3-96b", "gpt3-134b", "gpt3-175b", "llama-65b", "llama3-8b", "llama3-70b", "llama3-405b")


class Run(NamedTuple):
    """One call of the command. `input`: the file that is its standard input."""

    label: str
    arguments: list[str]
    input: str | None = None


class Case(NamedTuple):
    command: str
    name: str
    runs: list[Run]


def all_cases(files: Path) -> list[Case]:
    """Return all cases. Those of reading and reporting depend on what lies in `files`."""
    cases = [*_usage(), *_schedule(), *_read(files), *_simulate(), *_plan(), *_estimate(), *_report(files)]
    # Small sizes come up in more than one way.
    return list({(case.command, case.name): case for case in reversed(cases)}.values())[::-1]


def _case(command: str, arguments: str | Sequence[str], *variants: Sequence[str], input: str | None = None) -> Case:
    """`arguments` as they are, or with each variant behind them."""
    base = arguments.split() if isinstance(arguments, str) else list(arguments)
    runs = [Run(" ".join(variant) or "as it is", [*base, *variant], input) for variant in (variants or ((),))]
    return Case(command, " ".join(base) + (f" < {input}" if input else ""), runs)


def _formats(*names: str) -> list[list[str]]:
    return [["--format", name] for name in names]


# -- usage
# ----------------------------------------------------------------------------------------------------------------------


def _usage() -> Iterator[Case]:
    for command in ("", "schedule", "simulate", "plan", "estimate", "profile", "report"):
        yield _case("usage", f"{command} --help")
        yield _case("usage", command)
        yield _case("usage", f"{command} --sheduel 1f1b")
        yield _case("usage", f"{command} --format ascii")
    for line in (
        "--version",
        "scheduel",
        "schedule schedule",
        "profile --model gpt3-13b --mbs 0",
        "profile --model gpt",
    ):
        yield _case("usage", line)


# -- schedule
# ----------------------------------------------------------------------------------------------------------------------


def flags(schedule: str, ranks: int, microbatches: int, *more: str) -> list[str]:
    return ["schedule", "--schedule", schedule, "--pp", str(ranks), "--microbatches", str(microbatches), *more]


def balances(*more: str) -> Iterator[list[str]]:
    for balance in ("none", "bpipe"):
        yield ["--balance", balance, *more]


def _schedule() -> Iterator[Case]:
    for number, asked in enumerate(_schedule_flags()):
        variants = _formats(*FORMATS)
        if number % 10 == 0:
            # The name says the format.
            variants += [["--output", f"out/schedule.{suffix}"] for suffix in ("csv", "json", "svg", "txt", "pdf")]
        # Those of many cells take seconds to draw.
        if number % 50 == 0 and int(asked[asked.index("--pp") + 1]) <= 6:
            variants.append(["--output", "out/schedule.png"])
        yield _case("schedule", asked, *variants)
    for line in SCHEDULE_REFUSED.strip().splitlines():
        yield _case("schedule", f"schedule {line}", *_formats("grid", "json"))


def _schedule_flags() -> Iterator[list[str]]:
    for ranks in range(1, 17):
        for microbatches in sorted({1, ranks - 1, ranks, 2 * ranks + 1, 4 * ranks} - {0}):
            for balance in balances():
                yield flags("1f1b", ranks, microbatches, *balance)
    for ranks, times in itertools.product((1, 2, 3, 4, 7, 8, 13, 16), (1, 2, 4)):
        for balance in balances():
            yield flags("gpipe", ranks, times * ranks - (times == 4), *balance)
    for ranks, chunks in itertools.product((1, 2, 3, 4, 5, 6, 8, 12, 16), (2, 3, 4)):
        for microbatches in (ranks, 2 * ranks, 4 * ranks) if chunks == 2 else (3 * ranks,):
            for balance in balances("--vp", str(chunks)):
                yield flags(CHUNKED, ranks, microbatches, *balance)
    yield from _grouped_flags()
    yield from _bounded_flags()
    yield from _partnered_flags()


def _grouped_flags() -> Iterator[list[str]]:
    """Return the groups other than p, and micro-batches that no group divides."""
    for ranks in (2, 3, 4, 5, 8):
        for group, microbatches in (
            (ranks + 1, 2 * ranks + 2),
            (2 * ranks, 4 * ranks),
            (ranks, 2 * ranks + 1),
            (ranks, ranks - 1),
        ):
            for balance in balances("--vp", "2", "--group", str(group)):
                yield flags(CHUNKED, ranks, microbatches, *balance)
        yield flags(CHUNKED, ranks, 2 * ranks, "--vp", "2", "--group", str(ranks - 1))
        yield flags(CHUNKED, ranks, 2 * ranks + 1, "--vp", "3", "--balance", "bpipe")


def _bounded_flags() -> Iterator[list[str]]:
    """From bounds that nothing can keep to bounds that ask for nothing; one for all and one for each."""
    for ranks, microbatches in ((2, 4), (4, 8), (5, 4), (7, 9), (8, 16)):
        for bound in sorted({1, 2, (ranks + 2) // 2, (ranks + 2) // 2 + 1, ranks, ranks + 3}):
            yield flags("1f1b", ranks, microbatches, "--balance", "bpipe", "--bound", str(bound))
        falling = ",".join(str(max(2, ranks - rank)) for rank in range(ranks))
        for each in (falling, ",".join(falling.split(",")[::-1]), falling + ",3", "3"):
            yield flags(
                "1f1b",
                ranks,
                microbatches,
                "--balance",
                "bpipe",
                "--bound",
                each + ("" if "," in each else ",3" * (ranks - 1)),
            )
    for ranks, chunks in ((2, 2), (4, 2), (4, 3), (6, 2)):
        for bound in (
            2,
            ranks * chunks - 1,
            ranks * chunks,
            ranks * chunks + 1,
            ranks * chunks + 2,
            3 * ranks * chunks,
        ):
            yield flags(CHUNKED, ranks, 2 * ranks, "--vp", str(chunks), "--balance", "bpipe", "--bound", str(bound))
    for bound in (2, 4, 7, 8):
        yield flags("gpipe", 4, 8, "--balance", "bpipe", "--bound", str(bound))


def _partnered_flags() -> Iterator[list[str]]:
    """Neighbours, halves, the order turned round, oneself, and lists that pair nobody."""
    for ranks in (2, 4, 6, 8, 5):
        neighbours = [rank ^ 1 if rank ^ 1 < ranks else rank for rank in range(ranks)]
        halves = [(rank + ranks // 2) % ranks for rank in range(ranks)]
        wrong = [(rank + 1) % ranks for rank in range(ranks)]
        own, short, beyond = list(range(ranks)), [1, 0], [*range(1, ranks), ranks]
        for partners in sorted({tuple(one) for one in (neighbours, halves, wrong, own, short, beyond)}):
            words = ["--balance", "bpipe", "--partners", ",".join(map(str, partners))]
            yield flags("1f1b", ranks, 2 * ranks, *words)
            if ranks == 4:
                yield flags(CHUNKED, ranks, 8, "--vp", "2", *words)
                yield flags("1f1b", ranks, 8, *words, "--bound", "3,4,4,3")


SCHEDULE_REFUSED = """
--schedule 1f1b --pp 4
--pp 4 --microbatches 8
--schedule 1f1b --pp 0 --microbatches 8
--schedule 1f1b --pp 4 --microbatches -1
--schedule 1f1b --pp 4 --microbatches x
--schedule 1f1b --pp 4 --microbatches 8 --vp 2
--schedule gpipe --pp 4 --microbatches 8 --vp 2
--schedule gpipe --pp 4 --microbatches 8 --group 2
--schedule 1f1b --pp 4 --microbatches 8 --group 4
--schedule interleaved-1f1b --pp 4 --microbatches 8
--schedule interleaved-1f1b --pp 4 --microbatches 8 --vp 1
--schedule interleaved-1f1b --pp 4 --microbatches 8 --vp 2 --group 1
--schedule interleaved-1f1b --pp 4 --microbatches 2 --vp 2
--schedule 1f1bb --pp 4 --microbatches 8
--schedule 1f1b --pp 4 --microbatches 8 --align
--schedule 1f1b --pp 4 --microbatches 8 --bound 3
--schedule 1f1b --pp 4 --microbatches 8 --partners 3,2,1,0
--schedule 1f1b --pp 4 --microbatches 8 --balance bpipe --bound x
--schedule 1f1b --pp 4 --microbatches 8 --balance bpipe --bound 0
--schedule 1f1b --pp 4 --microbatches 8 --balance bpipe --partners 3,2
--schedule 1f1b --pp 4 --microbatches 8 --balance paper
--schedule 1f1b --pp 4 --microbatches 8 --output out/nowhere/file.csv
--schedule 1f1b --pp 100000 --microbatches 100000
--schedule 1f1b --pp 4 --microbatches 8 --input in/none.csv
--input in/none.csv
--input in
"""


# -- schedules from files
# --------------------------------------------------------------------------------------------------------------


def _read(files: Path) -> Iterator[Case]:
    for path in sorted((files / "schedules").glob("*")):
        whole = not path.stem.startswith("damaged")
        base = f"schedule --input in/schedules/{path.name}"
        yield _case("read", base, *_formats(*(FORMATS if whole else ("grid",))))
        yield _case("read", f"{base} --align", *_formats(*(("grid", "json") if whole else ("grid",))))
        if not whole:
            continue
        for more in (
            "--balance bpipe",
            "--balance bpipe --bound 3",
            "--align --balance bpipe",
            "--balance bpipe --partners 1,0,3,2",
        ):
            yield _case("read", f"{base} {more}", *_formats("grid", "csv"))
        if path.suffix in (".csv", ".grid"):
            yield _case("read", "schedule --input -", *_formats("grid", "json"), input=f"in/schedules/{path.name}")
    for more in ("--schedule 1f1b", "--pp 4", "--microbatches 8", "--group 4", "--vp 2", "--bound 3"):
        yield _case("read", f"schedule --input in/schedules/split.csv {more}")


# -- simulate
# ----------------------------------------------------------------------------------------------------------------------

MEGATRON = (
    "--num-layers 80 --hidden-size 9984 --num-attention-heads 104 --seq-length 2048 --vocab-size 51200 --fp16 "
    "--sequence-parallel "
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 128 "
    "--attention-backend unfused --use-distributed-optimizer --recompute-activations"
)
CHUNKED_LAUNCH = "--num-layers-per-virtual-pipeline-stage 5 --bpipe --overlap-grad-reduce"
BIG = "simulate --model gpt3-96b --cluster a100-80g:4x8 --tp 4 --pp 8 --gbs 128"
SMALL = "simulate --model gpt3-13b --cluster a100-80g:8 --pp 8 --gbs 32"
# A line is one configuration: what stands behind BIG, or behind SMALL.
BIG_MORE = """
--recompute selective
--recompute full
--attention unfused
--attention unfused --precision fp16 --mbs 2
--attention unfused --precision fp16 --mbs 2 --balance bpipe
--precision fp32 --balance bpipe
--no-distributed-optimizer
--flops-formula papers --balance bpipe
--no-sequence-parallel
--vp 2
--vp 5 --balance bpipe
--schedule gpipe
--schedule gpipe --balance bpipe
--schedule interleaved-1f1b
--schedule interleaved-1f1b --vp 2 --balance bpipe
--layers 9,10,10,10,10,10,10,11 --balance bpipe
--layers 10,10,10
--kernels cpu
--seq 4096 --balance bpipe
--vocab-size 256000
--profile in/one.json --mbs 2
--profile in/sizes.json --balance bpipe
--profile in/measured.json
--profile in/each.json --balance bpipe
--profile in/wrong.json
--profile in/none.json
--mbs 3
--tp 3
--vp 7
--vp 100
--cluster a100:4x8
--cluster in/cluster.toml
--cluster in/wrong.toml
--model gpt
--model in/config.json
--model in/config.json --tp 2 --pp 16 --balance bpipe
"""
SMALL_MORE = """
--pp 1
--pp 2
--pp 4 --balance bpipe
--pp 5 --cluster a100-80g:5 --balance bpipe
--pp 7 --cluster a100-80g:7 --gbs 4 --balance bpipe
--gbs 4 --balance bpipe
--gbs 1
--pp 8 --balance bpipe
--pp 4 --vp 2
--pp 4 --vp 2 --balance bpipe
--pp 4 --vp 2 --gbs 9 --cluster a100-80g:4 --balance bpipe
--schedule gpipe
--cluster h100-80g:8 --recompute full --balance bpipe
--cluster in/cluster.json --balance bpipe
--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --swiglu --rms-norm --disable-bias-linear --rotary --no-dropout
--num-layers 24 --untie-embeddings-and-output-weights --num-query-groups 4 --kv-channels 128 --ffn-hidden-size 10000
--cluster b200-180g:8x8 --tp 8 --gbs 128
"""


def _simulate() -> Iterator[Case]:
    texts = _formats("table", "json")
    traced = ["--trace", "out/trace.json", "--plot", "out/plot.svg"]
    lines = [f"{BIG} --balance {balance}" for balance in ("none", "bpipe")]
    lines += [
        f"{base} {more}"
        for base, mores in ((BIG, BIG_MORE), (SMALL, SMALL_MORE))
        for more in mores.strip().splitlines()
    ]
    for line in lines:
        yield _case("simulate", line, *texts, traced)
    for model, balance in itertools.product(PRESETS, ("none", "bpipe")):
        layout = "--tp 8 --pp 8 --gbs 64" if model not in ("gpt3-13b", "llama3-8b") else "--pp 8 --gbs 32"
        for device in ("a100-80g:16x8", "h200-141g:8x8"):
            yield _case("simulate", f"simulate --model {model} --cluster {device} {layout} --balance {balance}", *texts)
    for schedule, ranks in itertools.product(("gpipe", "1f1b", CHUNKED), (2, 3, 4, 6, 8)):
        for microbatches, balance in itertools.product((1, ranks, 4 * ranks), ("none", "bpipe")):
            sizes = f"--model gpt3-13b --num-layers 48 --cluster a100-80g:{ranks} --pp {ranks} --gbs {microbatches}"
            chunks = " --vp 2" if schedule == CHUNKED else ""
            yield _case(
                "simulate", f"simulate {sizes} --schedule {schedule}{chunks} --balance {balance}", *texts, traced
            )
    # So many that the steady phase is continued, which a trace would not be.
    yield _case("simulate", f"{SMALL} --gbs 20000", *texts)
    yield _case("simulate", f"{SMALL} --balance bpipe --pp 4", ["--plot", "out/plot.png"], ["--plot", "out/plot.pdf"])
    yield from _launches("simulate", texts)


def _launches(command: str, variants: Sequence[Sequence[str]]) -> Iterator[Case]:
    for more in (
        "",
        CHUNKED_LAUNCH,
        "--num-experts 8",
        "--bpipe --recompute-granularity full --recompute-method uniform --hidden-size x",
    ):
        words = f"{MEGATRON} {more}".split()
        for kind in variants:
            yield Case(
                command,
                f"{kind[-1]}: launch {more}",
                [Run("", [command, "--cluster", "a100-80g:4x8", *kind, "--", *words])],
            )
    script = f"{command} --cluster a100-80g --from-script in/run.sh"
    for more in ("", "--set NODES=8", "--set NODES=8 --gbs 256 --recompute full", "--set nodes", "--set NODES=x"):
        yield _case(command, f"{script} {more}", *variants)
    yield _case(command, f"{command} --cluster a100-80g --from-script -", *variants, input="in/run.sh")
    yield _case(command, f"{command} --cluster a100-80g --from-script in/none.sh")
    yield _case(command, f"{command} --cluster a100-80g:8 --set A=1")
    yield _case(command, f"{command} --model gpt3-13b")
    yield _case(command, f"{command} --model gpt3-13b --cluster a100-80g:8")


# -- plan and estimate
# -----------------------------------------------------------------------------------------------------------------

PLANS = """
--model gpt3-13b --cluster a100-80g:1x8 --gbs 64
--model gpt3-13b --cluster a100-40g:2x8 --gbs 64 --rows 30
--model gpt3-13b --cluster a100-40g:8 --gbs 32 --schedule gpipe 1f1b interleaved-1f1b --even-layers
--model gpt3-13b --cluster in/cluster.json --gbs 64 --recompute none --balance bpipe
--model gpt3-13b --cluster a100-80g:5 --gbs 20
--model llama3-8b --cluster h100-80g:8 --gbs 64 --max-chunks 4
--model llama-65b --cluster h100-80g:2x8 --gbs 64 --recompute none --max-chunks 2 --max-micro-batch 4
--model llama-65b --cluster a100-80g:4x8 --gbs 64 --max-chunks 1 --max-micro-batch 4
--model llama3-70b --cluster in/cluster.toml --gbs 64 --max-chunks 2 --max-micro-batch 2
--model gpt3-96b --cluster a100-80g:4x8 --gbs 64 --attention unfused --precision fp16 --max-micro-batch 4 --max-chunks 2
--model gpt3-96b --cluster a100-80g:4x8 --gbs 64 --schedule 1f1b --recompute none --flops-formula papers
--model gpt3-96b --cluster a100-80g:4x8 --gbs 128 --profile in/sizes.json --max-chunks 2
--model gpt3-96b --cluster a100-80g:4x8 --gbs 64 --balance none --schedule interleaved-1f1b
--model gpt3-175b --cluster a100-80g:1x8 --gbs 64
--model gpt3-134b --cluster h200-141g:4x8 --gbs 32 --max-micro-batch 2 --no-distributed-optimizer
--model in/config.json --cluster a100-80g:4 --gbs 16 --precision fp32
--model gpt3-13b --cluster a100-80g:7 --gbs 5
--model gpt3-13b --cluster a100-80g:8 --gbs 64 --schedule gpip
--model gpt3-13b --cluster a100-80g:8 --gbs 64 --profile in/wrong.json
"""
ESTIMATES = """
--gbs 128 --pp 8 --mbs 1 2 --stage-mfu 37.8 55.2
--gbs 128 --pp 8 --mbs 2 4 --stage-mfu 48.2 52.1 --stage-seconds 0.5 0.9
--gbs 64 --pp 4 --mbs 1 8 --stage-mfu 30 60
--gbs 16 --pp 16 --mbs 1 4 --stage-mfu 40 41
--gbs 8 --pp 1 --mbs 1 2 --stage-mfu 40 50
--gbs 128 --pp 8 --mbs 2 1 --stage-mfu 55.2 37.8
--gbs 128 --pp 8 --mbs 1 3 --stage-mfu 37.8 55.2
--gbs 128 --pp 8 --mbs 1 2 --stage-mfu 0 55.2
--gbs 128 --pp 8 --mbs 1 2 --stage-mfu 37.8 155
--gbs 128 --pp 8 --mbs 1 --stage-mfu 37.8 55.2
--pp 8 --mbs 1 2 --stage-mfu 37.8 55.2
"""


def _plan() -> Iterator[Case]:
    texts = _formats("table", "json")
    for line in PLANS.strip().splitlines():
        yield _case("plan", f"plan {line}", *texts, ["--emit-args", "1"], ["--emit-args", "9"])
    yield from _launches(
        "plan", [["--max-chunks", "2", "--max-micro-batch", "2", "--rows", "3", *one] for one in texts]
    )


def _estimate() -> Iterator[Case]:
    for line in ESTIMATES.strip().splitlines():
        yield _case("estimate", f"estimate {line}", *_formats("table", "json"))
    for ranks, size in itertools.product((2, 4, 8, 16), (2, 4, 8)):
        yield _case("estimate", f"estimate --gbs 256 --pp {ranks} --mbs 1 {size} --stage-mfu 35.5 50.25")


# -- report
# ----------------------------------------------------------------------------------------------------------------------


def _report(files: Path) -> Iterator[Case]:
    for path in sorted((files / "runs").glob("*")):
        base = f"report in/runs/{path.name}"
        shown: list[list[str]] = _formats("table", "json")
        if not path.name.startswith("damaged"):
            shown += [["--iteration", "6"], ["--html", "out/page.html"], ["--trace", "out/trace.json"]]
        yield _case("report", base, *shown)
    for more in ("in/runs/none", "in/one.json", "", "in/runs/plain --iteration 99", "in/runs/plain --iteration x"):
        yield _case("report", f"report {more}", *_formats("table", "json"))


def spread(cases: Iterable[Case], limit: int | None) -> list[Case]:
    """At most `limit` cases of each command, evenly over all of them."""
    found: list[Case] = []
    for _, group in itertools.groupby(cases, lambda case: case.command):
        every = list(group)
        step = 1.0 if limit is None else max(1.0, len(every) / limit)
        found += [every[int(index * step)] for index in range(int(len(every) / step + 1e-9))]
    return found
