"""The cases that run on a GPU; daily tests run them on late devices."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.gpu.accelerators import Accelerator
from tests.gpu.common import Result


@dataclass(frozen=True)
class Case:
    """One case: `run` and `SIZES` of a module of this folder.

    Attributes:
        needs_gpu: Why a late device's answer means nothing; the code runs there nevertheless.
        own_process: Whether it changes the process that it runs in.
        group: The group of its module, if there are several.
    """

    module: str
    shows: str
    needs_gpu: str = ""
    own_process: bool = False
    group: str = ""

    def run(self, on: Accelerator, size: str, until: float) -> Result:
        group = (self.group,) if self.group else ()
        return self._module().run(on, self.sizes(size), until, *group)  # type: ignore[no-any-return]

    def sizes(self, size: str) -> Any:
        return self._module().SIZES[size]

    def _module(self) -> Any:
        return importlib.import_module(f"tests.gpu.{self.module}")


CASES: Mapping[str, Case] = {
    "versions": Case(
        "versions",
        "what is installed, and whether torch and the CUDA runtime use the same device",
        "a process with CUDA may load two CUDA runtimes",
    ),
    "peer": Case("peer", "one-sided copies between two processes are right"),
    "twice": Case("twice", "several trainings in one process over peer, each of which gives its memory back"),
    "streams": Case("streams", "the order of streams is right, and each wait is needed"),
    "pipelines": Case("pipelines", "whole pipelines, each rank on a stream of the one device"),
    "memory": Case("memory", "what each stage allocates, against the prediction"),
    "halves": Case(
        "halves",
        "whether split backwards of Megatron's own stage are right, also with Transformer Engine",
        own_process=True,
    ),
    "overhead": Case("overhead", "what balancing costs one stage, with copy engines, and which waits are exposed"),
    "nccl": Case("nccl", "whether the nccl transport is right with two ranks on one device"),
    "megatron": Case("megatron_stage", "Megatron's own stage: what moves, and that nothing differs", own_process=True),
    "nearly_full": Case("nearly_full", "a balanced program with no room to spare, and lending memory at the same time"),
    "side_stream": Case("side_stream", "activations of a side stream, with and without the engine knowing of it"),
    "combined": Case("combined", "activations of parts of layers on two streams, of two micro-batches at once"),
    "abandon": Case("abandon", "after an error a rank stops at once, however busy its device is"),
    "trainer": Case("trainings", "Megatron's trainer over every transport", own_process=True, group="trainer"),
    "trainer_te": Case(
        "trainings",
        "the same with Transformer Engine's layers, split backwards and FP8",
        "Transformer Engine has no kernels for it",
        own_process=True,
        group="trainer_te",
    ),
    "trainer_8": Case("trainings", "the same with 8 ranks and 32 micro-batches", own_process=True, group="trainer_8"),
    "schedules": Case(
        "trainings",
        "V-Half from stock's checkpoint, both directions, vocabulary, slices, CPU memory, interleaving",
        own_process=True,
        group="schedules",
    ),
    "captured": Case(
        "trainings",
        "iterations in one CUDA graph with their transfers: bits, reserved memory, seconds of a replay",
        own_process=True,
        group="captured",
    ),
    "true_size": Case(
        "trainings",
        "peaks of the trainer against the prediction, and an out of memory that balancing cures",
        own_process=True,
        group="true_size",
    ),
}
