"""How much of what a forward keeps for its backward leaves with its micro-batch, and who holds the rest.

What a forward keeps is counted in one of two ways. On a device its allocator counts: the bytes allocated by the
forward, without the stage's output, which the loop frees, and with what the stage received, which was there before. On
a CPU it is the storages that the graph shows and no other micro-batch saved too; what no node shows is missing. A
stage's first forward does not count: caches and workspaces are made in it, and what all micro-batches share would
count as its own.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import torch

from bpipe.runtime.capture import SavedStorage, only_holder
from bpipe.runtime.graph import plain_tensors

# Below this share the log says what stays: the peak is planned as if all of it left.
ENOUGH = 0.9
# A router of experts has a softmax, too, but saves far less than this share of a micro-batch.
SCORES = 0.05
ALLOCATOR, STORAGES = "allocator", "storages"


@dataclass(frozen=True)
class Share:
    """Share of one micro-batch of a stage that leaves."""

    stage: int
    moved_bytes: int

    kept_bytes: int
    """Bytes that its forward keeps."""

    counted_by: str
    """`ALLOCATOR` or `STORAGES`."""

    staying: Mapping[str, int]
    """Bytes that the graph shows and that stay, by what holds them."""

    hiding: Mapping[str, int]
    """Nodes that do not show what they saved, by kind."""

    by_plan_bytes: int = 0
    """Bytes that could leave and need not."""

    softmax_bytes: int = 0
    """Bytes that softmax nodes saved, which are attention scores if they are many."""

    @property
    def fraction(self) -> float:
        """Fraction that leaves of what should."""
        wanted = self.kept_bytes - self.by_plan_bytes
        return min(1.0, self.moved_bytes / wanted) if wanted > 0 else 1.0

    @property
    def enough(self) -> bool:
        return self.fraction >= ENOUGH

    @property
    def sentence(self) -> str:
        """A sentence on what was measured and, if it is not enough, on what probably holds the rest."""
        who = (
            "counted by the device's allocator"
            if self.counted_by == ALLOCATOR
            else "counted over the storages that its graph shows"
        )
        text = (
            f"stage {self.stage} moves {self.fraction:.2f} of what a forward keeps for its backward "
            f"({self.moved_bytes / 1e6:.4g} of {self.kept_bytes / 1e6:.4g} MB, {who})"
        )
        if self.by_plan_bytes:
            text += f"; by plan {self.by_plan_bytes / 1e6:.4g} MB stay"
        if self.softmax_bytes > SCORES * self.kept_bytes:
            text += f"; {self.softmax_bytes / 1e6:.4g} MB are attention scores: attention runs unfused"
        if self.enough:
            return text
        holders = [f"{nbytes / 1e6:.4g} MB {holder}" for holder, nbytes in Counter(self.staying).most_common(3)]
        unseen = self.kept_bytes - self.moved_bytes - self.by_plan_bytes - sum(self.staying.values())
        if unseen > 0.01 * self.kept_bytes:
            hidden = ", ".join(f"{kind} ({number})" for kind, number in self.hiding.items())
            holders.append(
                f"{unseen / 1e6:.4g} MB not shown by the graph"
                + (f", which hides what {hidden} saved" if hidden else "")
            )
        return f"{text}: little memory is freed. What stays: {'; '.join(holders) or 'unknown'}"


class Kept:
    """Collects shares over the forwards of one iteration.

    Args:
        minimum_bytes: Of the smallest storage that moves.
        allocated: Returns the bytes of the device that are allocated now; None on a CPU.
        shared: Whether slices of a micro-batch share a storage, which then does not count.
    """

    def __init__(
        self,
        minimum_bytes: int,
        allocated: Callable[[], int] | None,
        shared: Callable[[torch.UntypedStorage], bool] = lambda storage: False,
    ) -> None:
        self._minimum_bytes = minimum_bytes
        self._shared = shared
        self._allocated = allocated
        self._open = True
        self._before = 0
        self._first: dict[int, int] = {}
        self._kept: dict[int, list[int]] = {}
        # By stage, the share as the walk shows it.
        self._seen: dict[int, Share] = {}

    def starts(self) -> None:
        """Note that a forward is about to run."""
        if self._open and self._allocated is not None:
            self._before = self._allocated()

    def ran(
        self, stage: int, microbatch: int, outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]
    ) -> None:
        """Note that a forward has run, before anything is freed or made."""
        if not self._open or self._first.setdefault(stage, microbatch) == microbatch or self._allocated is None:
            return
        kept = self._allocated() - self._before
        kept -= sum(output.untyped_storage().nbytes() for output in plain_tensors(outputs) if only_holder(output))
        kept += sum(received.untyped_storage().nbytes() for received in plain_tensors(inputs))
        self._kept.setdefault(stage, []).append(kept)

    def asks(self, stage: int, microbatch: int) -> bool:
        """Whether the storages of this micro-batch are needed: of one per stage, and not the first."""
        return self._open and stage not in self._seen and self._first.get(stage, microbatch) != microbatch

    def saw(self, stage: int, own: Sequence[SavedStorage], hiding: Mapping[str, int], leaving_bytes: int) -> None:
        """Note the storages that the walk found and no other micro-batch saved; `leaving_bytes` of them leave."""
        staying: Counter[str] = Counter()
        own = [item for item in own if not self._shared(item.storage)]
        movable_bytes = sum(item.nbytes for item in own if item.alone and item.nbytes >= self._minimum_bytes)
        for item in own:
            if not item.alone:
                staying[f"saved by {item.kind} and held elsewhere too"] += item.nbytes
            elif item.nbytes < self._minimum_bytes:
                staying["in storages below --bpipe-min-bytes"] += item.nbytes
        kept_bytes = sum(item.nbytes for item in own)
        softmax_bytes = sum(item.nbytes for item in own if _is_softmax(item.kind))
        by_plan_bytes = movable_bytes - leaving_bytes
        self._seen[stage] = Share(
            stage, leaving_bytes, kept_bytes, STORAGES, staying, hiding, by_plan_bytes, softmax_bytes
        )

    def shares(self, moved_bytes: Mapping[int, int]) -> dict[int, Share]:
        """Return the shares by stage, for stages of which `moved_bytes` leave, and end collecting."""
        self._open = False
        shares = {}
        for stage, moved in moved_bytes.items():
            share = replace(self._seen.get(stage, Share(stage, 0, 0, STORAGES, {}, {})), moved_bytes=moved)
            if counted := self._kept.get(stage):
                share = replace(share, kept_bytes=median_low(counted), counted_by=ALLOCATOR)
            if share.kept_bytes > 0:
                shares[stage] = share
        return shares


def _is_softmax(kind: str) -> bool:
    """Whether a kind of node is a softmax, torch's or a fused one, and not the log-softmax of a loss."""
    return "softmax" in kind.lower() and "logsoftmax" not in kind.lower()
