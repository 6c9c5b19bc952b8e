"""The messages of a pair's control group between hosts of late devices: a host that waits for one lets another go on.

In: values of JSON. Out: the same, as from `bpipe.transport.control`. Gloo's time-outs are of no use here: who waits for
ever is known.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from typing import Any

from bpipe.transport.control import Subject
from tests.late.devices import extension

Mail = defaultdict[Subject, deque[str]]


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

    def exchange(self, about: Subject, value: Any) -> Any:
        self.send(about, value)
        return self.receive(about)


def controls(low: int, high: int) -> dict[int, LateControl]:
    """By rank, the two ends of one pair."""
    up: Mail = defaultdict(deque)
    down: Mail = defaultdict(deque)
    return {low: LateControl(low, high, up, down), high: LateControl(high, low, down, up)}
