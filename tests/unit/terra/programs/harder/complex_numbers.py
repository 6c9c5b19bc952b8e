"""Complex numbers: transforms, lazy conjugates and negations, real views of complex memory written in place."""

from __future__ import annotations

import torch

from tests.unit.terra.programs.program import Feature, Program


class ComplexNumbers(Program):
    name = "complex numbers"
    features = frozenset({Feature.COMPLEX, Feature.VIEW, Feature.IN_PLACE, Feature.BATCH, Feature.NUMBER})

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight = torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)
        self.kept = torch.zeros(3, 5, dtype=torch.complex64)
        self.optimizer = torch.optim.Adam([self.weight], lr=0.01)
        self.tensors, self.optimizers = {"weight": self.weight, "kept": self.kept}, {"adam": self.optimizer}

    def step(self, i: int) -> torch.Tensor:
        made = torch.fft.rfft(torch.from_numpy(self.array(i, 3, 8))) @ self.weight
        turned = made.conj()
        lazy = turned.imag
        self.note("lazy", turned.is_conj(), lazy.is_neg(), made.mH.is_conj())
        product = made @ turned.mT + made.mH.mT * (1 + 0.5j * i) @ self.weight.conj()[:, :3]
        back = torch.fft.irfft(turned * torch.polar(torch.ones(5), torch.arange(5.0)))
        with torch.no_grad():
            self.kept.real.add_(lazy, alpha=0.5)
            torch.view_as_real(self.kept)[..., 1] = made.angle()
            self.kept.conj().mul_(0.9j)
            self.kept[0] = turned[0]
        loss = (
            back.square().mean()
            + product.abs().mean() * 0.01
            + (lazy * made.real).mean()
            + torch.view_as_real(made * 1).amax()
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


build = ComplexNumbers
