"""Measure what an eviction takes of the main thread before its bytes move. In: nothing. Out: a table on stdout.

A graph of 24 layers, about as many nodes as a stage of a large model has, with tiny tensors: only Python is measured,
in processor time of this thread. The two ways to find what leaves alternate. Over NCCL each storage is an operation
besides, which no CPU shows.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from bpipe.runtime.capture import find
from bpipe.runtime.graph import nodes_of
from bpipe.runtime.retrace import Retrace

LAYERS, WIDTH, ROUNDS = 24, 16, 30
CPU = torch.device("cpu")


def layer(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention and an MLP, each behind a norm and in front of dropout: some 48 nodes."""
    hidden = torch.nn.functional.layer_norm(x, (WIDTH,))
    query, key, value = (hidden @ weight for weight in weights[:3])
    scores = torch.dropout(torch.softmax(query @ key.transpose(-1, -2) / WIDTH**0.5, -1), 0.1, True)
    x = x + torch.dropout((scores @ value) @ weights[3], 0.1, True)
    hidden = torch.nn.functional.layer_norm(x, (WIDTH,))
    return x + torch.dropout(torch.nn.functional.gelu(hidden @ weights[4]) @ weights[5], 0.1, True)


def forward(weights: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    received = torch.randn(2, 4, WIDTH, requires_grad=True)
    output = received
    for of_layer in weights:
        output = layer(output, of_layer)
    return output, received


def seconds(work: Callable[[], object]) -> float:
    begin_s = time.thread_time()
    work()
    return time.thread_time() - begin_s


def main() -> int:
    torch.set_num_threads(1)
    weights = [[torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(6)] for _ in range(LAYERS)]
    output, received = forward(weights)
    leaving = [item.storage for item in find([output.grad_fn], [received], CPU) if item.alone]
    retrace = Retrace.of([output.grad_fn], leaving)
    assert retrace is not None
    num_leaving = len(leaving)
    del leaving
    output, received = forward(weights)
    roots, inputs = [output.grad_fn], [received]
    assert len(retrace.find(roots, inputs) or ()) == num_leaving
    spent_s: dict[str, list[float]] = {"look at everything": [], "look where it was": []}
    for _ in range(ROUNDS):
        spent_s["look at everything"].append(seconds(lambda: find(roots, inputs, CPU)))
        spent_s["look where it was"].append(seconds(lambda: retrace.find(roots, inputs)))
    print(
        f"{sum(1 for _ in nodes_of(roots))} nodes, {num_leaving} storages leave, {ROUNDS} rounds; processor "
        f"milliseconds"
    )
    for name, each in spent_s.items():
        low, _, high = statistics.quantiles(each, n=4)
        print(f"{name:<20} {statistics.median(each) * 1e3:6.2f} ({low * 1e3:.2f} to {high * 1e3:.2f}, the middle half)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
