"""Make each mistake of `slice_mutations` in Megatron's GPT in 4 slices, in 64 bits, in a process of its own.

In: a path. Out: there, as JSON by name, how it was noticed: an error, or how far the loss and the worst gradient are
off; empty for what nobody noticed.
"""

# ruff: noqa: E402

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron.scheduling.start import startup

startup.prepare()

# isort: split
from megatron.core import parallel_state

from megatron.scheduling.hooks import patches
from megatron.scheduling.slices.state import Slicing
from tests.unit.scheduling import check_slices as whole_and_sliced
from tests.unit.scheduling.slice_mutations import MUTATIONS, ORDERS, USUAL, Mutation

NUMBER = 4


def main(path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for case in dict.fromkeys([USUAL, *(mutation.case for mutation in MUTATIONS.values())]):
        assert not noticed(case, {}, *ORDERS_OF_SLICES), f"{case}: noticed without a mistake"
    found = {name: noticed(mutation.case, mutated(mutation), *ORDERS_OF_SLICES) for name, mutation in MUTATIONS.items()}
    found |= {name: noticed(USUAL, {}, *orders) for name, orders in ORDERS.items()}
    Path(path).write_text(json.dumps(found))


ORDERS_OF_SLICES = (tuple(range(NUMBER)), tuple(reversed(range(NUMBER))))


def mutated(mutation: Mutation) -> dict[str, ModuleType]:
    """The module with the mistake in it, by name."""
    source = Path(str(module_of(mutation.module, {}).__file__)).read_text()
    assert source.count(mutation.line) == 1, f"{mutation.line} is not in the code: bring the table up to date"
    made: Any = ModuleType("mutated")
    sys.modules["mutated"] = made
    exec(compile(source.replace(mutation.line, mutation.instead), "mutated", "exec"), made.__dict__)
    return {mutation.module: made}


def module_of(name: str, instead: dict[str, ModuleType]) -> Any:
    return instead.get(name) or importlib.import_module(f"megatron.scheduling.slices.{name}")


@functools.cache
def expected(case: str) -> tuple[float, Any]:
    model, rows = model_and_rows(case)
    whole_and_sliced.forget_logged_losses()
    loss = whole_and_sliced.whole(model, rows)
    return loss, whole_and_sliced.gradients(model)


def model_and_rows(case: str) -> Any:
    described = whole_and_sliced.CASES[case]
    return (
        whole_and_sliced.model_of(described, torch.float64),
        whole_and_sliced.rows_of(whole_and_sliced.LENGTH, described.documents),
    )


def noticed(case: str, instead: dict[str, ModuleType], forwards: tuple[int, ...], backwards: tuple[int, ...]) -> str:
    """Compute in slices, in these orders, with these modules, and say what was wrong."""
    loss, gradients = expected(case)
    slicing = Slicing(NUMBER)
    slicing.cutting = module_of("cutting", instead).Cutting(whole_and_sliced.WAYS["4"])
    slicing._kept = module_of("kept", instead).KeptKeys(slicing.cutting)
    slicing._losses = module_of("experts", instead).ExpertLosses(slicing.cutting)
    attending = module_of("attention", instead).wraps(slicing._kept)
    looking = module_of("further", instead).wraps(slicing.cutting)
    installed = patches.install({**attending, **slicing._losses.wraps(), **looking})
    model, rows = model_and_rows(case)
    whole_and_sliced.forget_logged_losses()
    try:
        found = whole_and_sliced.in_slices(model, rows, slicing, forwards, backwards)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        installed.remove()
    routed = whole_and_sliced.CASES[case].routed
    near = 2e-6 if routed else 1e-12
    off = abs(found - loss) / abs(loss), whole_and_sliced.apart(whole_and_sliced.gradients(model), gradients)
    # What nobody has written yet may be anything, and no number is above a NaN.
    return "" if all(each <= near for each in off) else f"the loss is {off[0]:.1e} off, a gradient {off[1]:.1e}"


if __name__ == "__main__":
    main(sys.argv[1])
