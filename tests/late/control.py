"""The messages of a pair's control group between hosts of late devices: a host that waits for one lets another go on.

In: values of JSON. Out: the same, as from `bpipe.transport.control`. Gloo's time-outs are of no use here: who waits for
ever is known.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch

from bpipe.transport.control import Subject
from tests.late.devices import extension

Mail = defaultdict[Subject, deque[Any]]


class Sent:
    def wait(self) -> None:
        """Small messages need no receiver."""


class LateControl:
    def __init__(self, rank: int, partner: int, outbox: Mail, inbox: Mail) -> None:
        self._who = f"host {rank} waits to hear from host {partner} about"
        self._outbox, self._inbox = outbox, inbox

    def send(self, about: Subject, value: Any) -> Sent:
        self._outbox[about].append(json.dumps(value))
        return Sent()

    def receive(self, about: Subject) -> Any:
        extension().wait_until(lambda: bool(self._inbox[about]), f"{self._who} {about.name}")
        return json.loads(self._inbox[about].popleft())

    def send_tensors(self, about: Subject, tensors: Sequence[torch.Tensor]) -> Sent:
        # Copies on the host, which waits for its device.
        self._outbox[about].append([tensor.cpu() for tensor in tensors])
        return Sent()

    def receive_tensors(self, about: Subject) -> tuple[torch.Tensor, ...]:
        extension().wait_until(lambda: bool(self._inbox[about]), f"{self._who} {about.name}")
        return tuple(self._inbox[about].popleft())

    def exchange(self, about: Subject, value: Any) -> Any:
        self.send(about, value)
        return self.receive(about)


def controls(low: int, high: int) -> dict[int, LateControl]:
    """By rank, the two ends of one pair."""
    up: Mail = defaultdict(deque)
    down: Mail = defaultdict(deque)
    return {low: LateControl(low, high, up, down), high: LateControl(high, low, down, up)}
