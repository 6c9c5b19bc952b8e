"""All programs, by name."""

from __future__ import annotations

from tests.unit.terra.programs.harder import (
    accumulation,
    autocast,
    branches,
    complex_numbers,
    containers,
    float_shapes,
    functions,
    hooks,
    identity,
    masks,
    modes,
    numpy_memory,
    optimizers,
    randoms,
    recompute,
    views,
)
from tests.unit.terra.programs.judge import Build
from tests.unit.terra.programs.published import (
    bert_cls,
    bert_qa,
    dcgan,
    dropblock,
    fasterrcnn,
    gpt2,
    music_transformer,
    resnet50,
    sdpoint,
    yolov3,
)

PUBLISHED: dict[str, Build] = {
    each.build.name: each.build
    for each in (resnet50, bert_qa, yolov3, dcgan, gpt2, bert_cls, fasterrcnn, music_transformer, dropblock, sdpoint)
}
HARDER: dict[str, Build] = {
    each.build.name: each.build
    for each in (
        *(views, randoms, branches, functions, hooks, optimizers, accumulation, autocast),
        *(float_shapes, numpy_memory, identity, containers, modes, masks, complex_numbers, recompute),
    )
}
PROGRAMS = PUBLISHED | HARDER
# Seeds of the grammar that are tried.
GRAMMAR = range(200)
