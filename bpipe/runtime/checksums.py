"""Checksums of every storage that moves, to check that it comes back as it left. They are taken at three moments:

    before the put, on the stream that sends       [A]
    before the memory is freed, on compute's       [B]  differs from A if somebody else writes the memory
    before the backward reads it, on compute's     [C]  differs from B if it was not carried, or is read too early

Nothing waits for a checksum: all stay on the device until the iteration is over, and are compared then, before weights
are updated. The cause may be another feature, the memory or the link, so the error names the storage and who saved it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from bpipe.runtime import RuntimeFault
from bpipe.schedule.action import Action, Key

# Bytes multiplied at once: what a CPU's cache holds, and on a device enough for its memory to be the limit.
CPU_CHUNK_BYTES, DEVICE_CHUNK_BYTES = 1 << 20, 16 << 20
_WORD_BYTES = 8
# Names of the streams on which sums are taken; each has a pool of memory for its products.
SENDING, COMPUTING = "sending", "computing"
# At the latest after this many iterations the log says what was checked.
FIRST = 2


class Checksums:
    """Sums of a storage's words of 8 bytes, each times a weight for its position.

    Weights are odd, so every changed bit shows; they differ, so exchanged words show, unless they differ only in their
    highest bit. A storage has a sum for each chunk of it, so exchanged chunks show too. Each stream on which sums are
    taken needs the memory of two chunks at most.
    """

    def __init__(self, device: torch.device, chunk_bytes: int | None = None) -> None:
        if chunk_bytes is None:
            chunk_bytes = CPU_CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES
        self._device, self._words = device, chunk_bytes // _WORD_BYTES
        # By stream, as long as the longest piece so far.
        self._weights: dict[str, torch.Tensor] = {}
        self._products: dict[str, torch.Tensor] = {}

    def of(self, tensors: Sequence[torch.Tensor], moment: str) -> torch.Tensor:
        """Return the sums of flat uint8 tensors, one int64 for each chunk of each, without waiting for them."""
        pieces = [piece for tensor in tensors for piece in self._pieces(tensor)]
        longest = max(piece.numel() for piece in pieces)
        products = self._products.get(moment)
        if products is None or products.numel() < longest:
            products = self._products[moment] = torch.empty(longest, dtype=torch.int64, device=self._device)
            self._weights[moment] = weights(longest).to(self._device)
        odd = self._weights[moment]
        sums = torch.empty(len(pieces), dtype=torch.int64, device=self._device)
        for number, piece in enumerate(pieces):
            count = piece.numel()
            torch.mul(piece, odd[:count], out=products[:count])
            torch.sum(products[:count], 0, out=sums[number])
        return sums

    def num_sums(self, nbytes: int) -> int:
        """Return the number of sums of a storage."""
        return -(-(nbytes // _WORD_BYTES) // self._words) + (nbytes % _WORD_BYTES > 0)

    def _pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        whole = tensor.numel() - tensor.numel() % _WORD_BYTES
        yield from tensor[:whole].view(torch.int64).split(self._words) if whole else ()
        if whole < tensor.numel():
            yield tensor[whole:].to(torch.int64)


def weights(count: int) -> torch.Tensor:
    """Return the first `count` of a fixed sequence of odd pseudo-random numbers."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64) * -0x61C8864680B583EB
    mixed.bitwise_xor_(mixed >> 29)
    return mixed.mul_(-0x3B314601E57A13AD).bitwise_or_(1)


@dataclass
class _Checked:
    """A micro-batch that left: its storages, and their sums at each moment."""

    action: Action
    link: str
    lengths: Sequence[int]
    described: Sequence[str]
    sums: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Certificate:
    """What was checked and found unchanged."""

    iterations: int = 0
    microbatches: int = 0
    """Micro-batches that left and came back."""

    storages: int = 0
    nbytes: int = 0


class Verifier:
    """Checks the first `iterations` of one rank (infinity: all), all programs together. `name` is for errors."""

    def __init__(self, name: str, device: torch.device, iterations: float) -> None:
        self._name, self._device, self._iterations = name, device, iterations
        self._checksums: Checksums | None = None
        self._checked: list[_Checked] = []
        # By stage and micro-batch, what left last.
        self._latest: dict[Key, _Checked] = {}
        self._number = 0
        # Whether the log says what was checked after the iteration that just ended.
        self.first_over = False
        # Whether this iteration is captured into a graph: sums that are taken then are never compared.
        self.is_captured = False
        self.certificate = Certificate()

    @property
    def on(self) -> bool:
        """Whether this iteration is checked."""
        return self.certificate.iterations < self._iterations and not self.is_captured

    def leaves(self, action: Action, link: str, tensors: Sequence[torch.Tensor], described: Sequence[str]) -> None:
        """Take the sums [A] of what an EVICT sends, in the order of its stream."""
        if tensors:
            checked = _Checked(action, link, [tensor.numel() for tensor in tensors], described)
            checked.sums.append(self._sums(tensors, SENDING))
            self._latest[action.key] = checked
            self._checked.append(checked)

    def is_here(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Take the sums of what is about to be freed [B] or read again [C], in the order of compute's stream."""
        checked = self._latest.get(action.key)
        if checked is not None and tensors:
            checked.sums.append(self._sums(tensors, COMPUTING))

    def _sums(self, tensors: Sequence[torch.Tensor], moment: str) -> torch.Tensor:
        if self._checksums is None:
            self._checksums = Checksums(self._device)
        return self._checksums.of(tensors, moment)

    def end(self) -> None:
        """Compare all sums of the iteration. Waits for the device once.

        Raises RuntimeFault that names the first storage that changed.
        """
        self.first_over = False
        if self.is_captured or self.certificate.iterations >= self._iterations:
            return
        self._number += 1
        checked, self._checked = self._checked, []
        self._latest.clear()
        taken = [sums for microbatch in checked for sums in microbatch.sums]
        on_host = iter(torch.cat(taken).cpu().split([sums.numel() for sums in taken]) if taken else ())
        for microbatch in checked:
            self._compare(microbatch, [next(on_host) for _ in microbatch.sums])
        before = self.certificate
        self.certificate = Certificate(
            before.iterations + 1,
            before.microbatches + len(checked),
            before.storages + sum(len(microbatch.lengths) for microbatch in checked),
            before.nbytes + sum(sum(microbatch.lengths) for microbatch in checked),
        )
        self.first_over = self.certificate.iterations == min(FIRST, self._iterations)
        if not self.on:
            self._checksums = None

    def _compare(self, checked: _Checked, moments: Sequence[torch.Tensor]) -> None:
        assert self._checksums is not None
        for before, after, change in zip(moments, moments[1:], _CHANGES, strict=False):
            if torch.equal(before, after):
                continue
            first = int((before != after).nonzero()[0])
            for number, nbytes in enumerate(checked.lengths):
                first -= self._checksums.num_sums(nbytes)
                if first < 0:
                    raise self._fault(checked, number, change)

    def _fault(self, checked: _Checked, number: int, change: str) -> RuntimeFault:
        action = checked.action
        return RuntimeFault(
            f"{self._name}: {change.format(link=checked.link)}: iteration {self._number} since the start, micro-batch "
            f"{action.microbatch} of stage {action.stage}, storage {number + 1} of {len(checked.lengths)} "
            f"({checked.described[number]}, {checked.lengths[number]} bytes). Weights were not updated with it. "
            "Train without --bpipe, or try another --bpipe-transport: if the same storage differs again, the link "
            "is not the cause"
        )


_CHANGES = (
    "memory being evicted to {link} changed during the transfer, so something else writes to it",
    "data that came back from {link} differs from what was evicted",
)
