"""The messages of a pair's control group between hosts of late devices: a host that waits for one lets another go on.

In: values of JSON, or tensors. Out: the same, as from `bpipe.transport.control`. Gloo promises no buffer between two
ranks (gloo/transport/tcp/pair.cc: a send asks for the other end's receive first), so a message lies with its sender
until it has been taken: a wait for it ends no earlier, and whoever lets go of it before loses it. Gloo's time-outs are
of no use here: who waits for ever is known.
"""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.transport.control import Subject
from tests.late.devices import extension


@dataclass
class Letter:
    """A message under way."""

    value: Any
    is_taken: bool = False
    is_lost: bool = False


Mail = defaultdict[Subject, deque[Letter]]


class Sent:
    """The sender's hold of a message."""

    def __init__(self, letter: Letter, who: str) -> None:
        self._letter, self._who = letter, who

    def wait(self) -> None:
        letter = self._letter
        extension().wait_until(lambda: letter.is_taken, self._who)

    def __del__(self) -> None:
        self._letter.is_lost = not self._letter.is_taken


class LateControl:
    def __init__(self, rank: int, partner: int, outbox: Mail, inbox: Mail) -> None:
        self._who, self._other = f"host {rank}", f"host {partner}"
        self._outbox, self._inbox = outbox, inbox

    def send(self, about: Subject, value: Any) -> Sent:
        return self._put(about, json.dumps(value))

    def receive(self, about: Subject) -> Any:
        return json.loads(self._take(about))

    def send_tensors(self, about: Subject, tensors: Sequence[torch.Tensor]) -> Sent:
        # Copies on the host, which waits for its device.
        return self._put(about, [tensor.cpu() for tensor in tensors])

    def receive_tensors(self, about: Subject) -> tuple[torch.Tensor, ...]:
        return tuple(self._take(about))

    def exchange(self, about: Subject, value: Any) -> Any:
        sent = self.send(about, value)
        heard = self.receive(about)
        sent.wait()
        return heard

    def _put(self, about: Subject, value: Any) -> Sent:
        letter = Letter(value)
        self._outbox[about].append(letter)
        return Sent(letter, f"{self._who} waits for {self._other} to take its message about {about.name}")

    def _take(self, about: Subject) -> Any:
        inbox = self._inbox[about]
        extension().wait_until(lambda: bool(inbox), f"{self._who} waits to hear from {self._other} about {about.name}")
        letter = inbox.popleft()
        if letter.is_lost:
            raise RuntimeError(f"{self._other} let go of its message about {about.name} before {self._who} took it")
        letter.is_taken = True
        return letter.value


def controls(low: int, high: int) -> dict[int, LateControl]:
    """By rank, the two ends of one pair."""
    up: Mail = defaultdict(deque)
    down: Mail = defaultdict(deque)
    return {low: LateControl(low, high, up, down), high: LateControl(high, low, down, up)}
