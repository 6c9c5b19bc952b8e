"""Hold what slices of one training are: their number and lengths, and what is kept of them.

In: `--bpipe-slices`. Out: wraps, `Cutting`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bpipe.config.features.feature import Settings
from bpipe.schedule.layout import EVEN, SliceLengths
from bpipe.schedule.memory import KeptMemory
from megatron.scheduling.hooks import patches
from megatron.scheduling.slices import attention, mtp
from megatron.scheduling.slices.cuts import Cutting
from megatron.scheduling.slices.experts import ExpertLosses
from megatron.scheduling.slices.key_value_cache import KeptKeys
from megatron.scheduling.slices.lengths import bounds_of
from megatron.scheduling.slices.support import judge


class Slicing:
    """Slices of one training: `number` slices per micro-batch, of these `lengths`."""

    def __init__(self, number: int, lengths: SliceLengths = EVEN) -> None:
        self.number, self._lengths = number, lengths
        self.cutting = Cutting(())
        self._kept = KeptKeys(self.cutting)
        self._losses = ExpertLosses(self.cutting)
        self._judged = False

    @property
    def kept_bytes(self) -> int:
        """Keys, values and their gradients that this rank keeps now."""
        return self._kept.nbytes

    @property
    def peak_kept_bytes(self) -> int:
        """The most of them at once so far."""
        return self._kept.peak_bytes

    @property
    def kept_memory(self) -> dict[int, KeptMemory]:
        """Return, by stage, the memory kept of one micro-batch."""
        gradients = self._kept.gradients_bytes
        return {stage: KeptMemory(size, gradients.get(stage, 0)) for stage, size in self._kept.keys_bytes.items()}

    def keeps(self, storage: torch.UntypedStorage) -> bool:
        """Return whether it is one of keys or values, which all slices of a micro-batch share."""
        return self._kept.holds(storage)

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        return {**attention.wraps(self._kept), **self._losses.wraps(), **mtp.wraps(self.cutting)}

    def judge(self, models: Sequence[torch.nn.Module]) -> None:
        """Raise ValueError where these models cannot be cut; they are the same in every call."""
        if not self._judged:
            judge(models)
            self._judged = True

    def begin(self, length: int, config: object) -> None:
        """Begin with sequences of so many tokens. `config` is Megatron's, of the model.

        Raises ValueError where they have no slices of the lengths that are asked for, with whole parts on all
        tensor-parallel ranks.
        """
        settings = Settings(config)
        unit = settings.tensor_model_parallel_size if settings.sequence_parallel else 1
        try:
            self.cutting.bounds = bounds_of(self._lengths, length, self.number, unit, config)
        except ValueError as error:
            named = self._lengths if isinstance(self._lengths, str) else ",".join(map(str, self._lengths))
            raise ValueError(f"--bpipe-slices {self.number} --bpipe-slice-lengths {named}: {error}") from None

    def free(self, stage: int, microbatch: int) -> None:
        """Free what is kept of a micro-batch in a stage: nothing reads it any more."""
        self._kept.free(stage, microbatch)
        self._losses.free(stage, microbatch)

    def clear(self) -> None:
        """Drop what another call of the loop kept."""
        self._kept.clear()
        self._losses.clear()
