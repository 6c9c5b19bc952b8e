"""Checkpoints of any schedule equal stock's: the same keys and shapes, and each loads and continues the other's.

Both train four iterations and save after two. Each then continues from its own checkpoint and from the other's; a lost
optimizer or random state would make the rest differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from tests.gloo.compare import alike, checkpointed, losses_of, same
from tests.gloo.conftest import Case, Outcome
from tests.gloo.flags import (
    BPIPE,
    EIGHT_LAYERS,
    FOUR,
    INTERLEAVED,
    OVERLAPS,
    QUIET,
    RESHARDABLE,
    TWO,
    TWO_STAGES,
    UNTIED,
    batch,
)
from tests.gloo.test_placed import NAMED, by, pipeline
from tests.gloo.test_vocabulary import EMBEDDING, FP32, near, pairs_of

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Saved:
    """Flags of a case: common ones, stock's and ours.

    `named`: weights are compared by name, otherwise rank by rank.
    """

    common: str
    stock: str
    ours: dict[str, str]
    world: int = 4

    @property
    def named(self) -> bool:
        return "--named" in self.common


V, GROUPED = "--bpipe-schedule v-half", "--bpipe-schedule grouped-interleaved"
PARALLEL = "--ckpt-fully-parallel-load"


def of_a_v(flags: str, more: str = "") -> Saved:
    return Saved(f"{NAMED} {batch(6)} {flags}", "", {"ours": f"{V} {more}"})


def of_two_pipes(flags: str, more: str, ranks: int) -> Saved:
    common = f"{NAMED} --num-layers {2 * ranks} {batch(2 * ranks)} {flags}"
    return Saved(common, pipeline(ranks // 2), {"ours": f"{by('bitpipe-2', ranks)} {more}"}, ranks)


# Compared to the last bit.
EXACT: dict[str, Saved] = {
    "tied": of_a_v(FOUR),
    "bf16": of_a_v(f"{FOUR} --bf16"),
    "sharded": of_a_v(f"{TWO} {RESHARDABLE} --bf16"),
    # Two copies of a tied weight in one tensor would both be updated in the same memory.
    "sharded_loaded_in_parallel": of_a_v(f"{TWO} {RESHARDABLE}", PARALLEL),
    "all_reduced": of_a_v(f"{TWO} --use-tp-pp-dp-mapping", PARALLEL),
    **{
        f"two_pipes_of_{ranks}_{name}": of_two_pipes(flags, more, ranks)
        for ranks in (4, 8)
        for name, (flags, more) in {
            "tied": ("", ""),
            "sharded": (f"{RESHARDABLE} --bf16", ""),
            "sharded_loaded_in_parallel": (RESHARDABLE, PARALLEL),
        }.items()
    },
    "halves": Saved(batch(8), "", {"ours": f"--bpipe-schedule zb-h1 {BPIPE} --bpipe-transport peer"}),
    "halves_of_chunks": Saved(f"{INTERLEAVED} {QUIET} {batch(8)}", "", {"ours": f"{GROUPED} {BPIPE}"}),
    "halves_with_a_distributed_optimizer": Saved(
        f"{TWO_STAGES} {batch(8)} {OVERLAPS}", "", {"ours": "--bpipe-schedule 1f1b-split --bpipe-delay 1"}
    ),
}
DISTRIBUTED = f"{TWO_STAGES} {RESHARDABLE}"
# Ways to split the vocabulary, compared with stock within rounding.
SHARDED: dict[str, tuple[str, str]] = {
    "untied": (UNTIED, "1"),
    "untied_by_2": (UNTIED, "2"),
    "untied_inputs": (UNTIED, "1 --bpipe-vocabulary-input"),
    "tied": ("", "1"),
    "tied_by_2": ("", "2"),
    "tied_inputs": ("", "1 --bpipe-vocabulary-input"),
    "distributed": (f"{UNTIED} {DISTRIBUTED}", "1"),
    "distributed_by_2": (f"{UNTIED} {DISTRIBUTED}", "2"),
    "distributed_inputs": (f"{UNTIED} {DISTRIBUTED}", "1 --bpipe-vocabulary-input"),
    "tied_distributed_inputs": (DISTRIBUTED, "2 --bpipe-vocabulary-input"),
    # Of several replicas' copies, one replica writes each file.
    "tied_data": (TWO_STAGES, "1"),
    "tied_data_inputs": (TWO_STAGES, "1 --bpipe-vocabulary-input"),
}
# Schedules with shards equal 1F1B with shards to the bit, except for sums of a tied embedding in shards.
SHARDED_SCHEDULES: dict[str, tuple[str, str]] = {
    "tied": (FOUR, ""),
    "untied": (f"{FOUR} {UNTIED}", ""),
    "tied_distributed": (f"{TWO} {RESHARDABLE}", ""),
    "inputs_tied": (FOUR, "--bpipe-vocabulary-input"),
    "inputs": (f"{FOUR} {UNTIED}", "--bpipe-vocabulary-input"),
    "inputs_distributed": (f"{TWO} {RESHARDABLE} {UNTIED}", "--bpipe-vocabulary-input"),
}
SCHEDULES = {
    "v_half": V,
    "grouped": f"{GROUPED} --num-virtual-stages-per-pipeline-rank 2",
}


def cases_of(
    saved: Saved, continued: Iterable[tuple[str, str]] = tuple(product(("stock", "ours"), repeat=2))
) -> list[Case]:
    """Return training and continuing cases; `continued` pairs a checkpoint's case with the case that continues it."""
    kinds = {"stock": f"{saved.common} {saved.stock}", **{k: f"{saved.common} {f}" for k, f in saved.ours.items()}}
    cases = [
        Case(kind, f"{flags} --train-iters 4 --save {{folder}}/{kind} --save-interval 2")
        for kind, flags in kinds.items()
    ]
    for first, second in continued:
        loads = f"--train-iters 4 --load {{folder}}/{first} --ckpt-step 2"
        cases.append(Case(f"{second}_after_{first}", f"{kinds[second]} {loads}"))
    return cases


def slowly(names: dict[str, Any], *always: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in always else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slowly(EXACT, "tied"))
def test_each_continues_the_others_checkpoint_to_the_bit(run_cases: Callable[..., Outcome], name: str) -> None:
    saved = EXACT[name]
    outcome = run_cases(saved.world, cases_of(saved), 880)
    equal = alike if saved.named else same
    equal(outcome, "stock", "ours", saved.world)
    for first, second in product(("stock", "ours"), repeat=2):
        equal(outcome, "stock", f"{second}_after_{first}", saved.world, last=2)
    stock, ours = (checkpointed(outcome, kind) for kind in ("stock", "ours"))
    assert stock == ours
    assert name != "tied" or not any("output_layer" in key for key in ours), "a tied weight is saved once"


@pytest.mark.slow
@pytest.mark.parametrize("name", slowly(SHARDED, "untied"))
def test_shards_of_the_vocabulary_are_saved_as_the_whole_layer(run_cases: Callable[..., Outcome], name: str) -> None:
    flags, split = SHARDED[name]
    saved = Saved(f"--tensors {batch(8)} {flags}", "", {"ours": f"--bpipe-vocabulary {split}"})
    outcome = run_cases(4, cases_of(saved), 600)
    stock, ours = (
        {key: size for key, size in checkpointed(outcome, kind).items() if size is not None}
        for kind in ("stock", "ours")
    )
    assert any(key.startswith("optimizer") and EMBEDDING in key for key in stock)
    assert ours == stock
    for kind in ("stock", "ours"):
        pairs = pairs_of(outcome, f"ours_after_{kind}", f"stock_after_{kind}", "start", 2 if TWO_STAGES in flags else 4)
        assert all(torch.equal(*pair) for pair in pairs.values())
        whole, *others = (losses_of(outcome, case)[-2:] for case in (kind, f"ours_after_{kind}", f"stock_after_{kind}"))
        for losses in others:
            assert all(near(*pair, FP32.later) for pair in zip(losses, whole, strict=True))
        # A run continues from its own checkpoint as if it had not ended.
        same(outcome, kind, f"{kind}_after_{kind}", 4, last=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED_SCHEDULES)
def test_shards_of_any_schedule_are_saved_as_stocks(run_cases: Callable[..., Outcome], name: str) -> None:
    """Another case loads and continues it, to the bit if both have shards."""
    flags, inputs = SHARDED_SCHEDULES[name]
    shards = f"--bpipe-vocabulary 1 {inputs}"
    ours = {"one": shards, **{kind: f"{shards} {more}" for kind, more in SCHEDULES.items()}}
    continued = [*product(("stock", "v_half"), ("stock", *ours)), ("one", "v_half")]
    outcome = run_cases(4, cases_of(Saved(f"--named {EIGHT_LAYERS} {batch(6)} {flags}", "", ours), continued), 880)
    checkpoints = [checkpointed(outcome, kind) for kind in ("stock", *ours)]
    assert checkpoints == [checkpoints[0]] * len(checkpoints)
    stock = losses_of(outcome, "stock")
    for kind in ours:
        assert near(losses_of(outcome, kind)[-1], stock[-1], FP32.later)
    for first, second in continued:
        case = f"{second}_after_{first}"
        assert near(losses_of(outcome, case)[-1], stock[-1], FP32.later), case
        if name != "inputs_tied" and second in SCHEDULES:
            alike(outcome, f"one_after_{first}" if first != "one" else "one", case, last=2)
    if name != "inputs_tied":
        for kind in SCHEDULES:
            alike(outcome, "one", kind)
