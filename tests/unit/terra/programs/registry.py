"""All programs, by name."""

from __future__ import annotations

from tests.unit.terra.programs.harder import (
    accumulation,
    autocast,
    branches,
    complex_numbers,
    containers,
    functions,
    hooks,
    identity,
    masks,
    modes,
    numpy_memory,
    randoms,
    recompute,
)
from tests.unit.terra.programs.judge import Build
from tests.unit.terra.programs.published import dcgan, gpt2

PUBLISHED: dict[str, Build] = {each.build.name: each.build for each in (dcgan, gpt2)}
HARDER: dict[str, Build] = {
    each.build.name: each.build
    for each in (
        *(randoms, branches, functions, hooks, accumulation, autocast),
        *(numpy_memory, identity, containers, modes, masks, complex_numbers, recompute),
    )
}
PROGRAMS = PUBLISHED | HARDER
# Seeds of the grammar that are tried.
GRAMMAR = range(200)
