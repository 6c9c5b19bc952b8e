"""Where in a program an operation was issued, from the running thread's frames and autograd node.

Autograd issues the operations of a backward pass, at whichever line began that pass. Their place is that of the forward
operation whose gradient they compute, or the program's own line if it wrote the backward itself. A forward and its
backward are matched by autograd's sequence number, which a node keeps from its forward.
"""

import bisect
import dis
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_HERE = str(Path(__file__).parents[1]) + "/"
# Frames between an operation and its observer: torch's ways into a mode, and Python's frozen modules.
_BETWEEN = (
    _HERE,
    "<",
    *(f"{_TORCH}{name}" for name in "_dynamo/ _ops.py _compile.py overrides.py utils/_python_dispatch.py".split()),
)
# Python's own library runs what a program passes to it, such as the entry and the exit of a context.
_LIBRARY = sysconfig.get_paths()["stdlib"] + "/"
_PACKAGES = _LIBRARY + "site-packages/"
# The name by which Python calls autograd's engine, which runs nodes in this thread or in its own.
_ENGINE = "run_backward"
# The sequence number of a node that adds a gradient to a leaf: it belongs to no forward operation.
_NO_FORWARD = 2**64 - 1


@dataclass(frozen=True)
class Place:
    """A line of the program: the innermost outside of torch and of Python's library."""

    file: str
    line: int
    function: str
    # The innermost line of torch below it, if any.
    within: str = ""
    # Autograd's name of a node, if the operation computes the gradient of one that was issued here.
    backward_of: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


UNKNOWN = Place("<unknown>", 0, "?")


class Places:
    """Finds the places of one program's operations, and remembers those of forwards for their backwards."""

    def __init__(self) -> None:
        self._lines: dict[tuple[CodeType, int, CodeType | None, int], Place] = {}
        self._forwards: dict[int, Place] = {}

    def here(self) -> Place:
        """Return the place of the operation that is being dispatched in this thread."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            place = self._line() or UNKNOWN
            # The operation's own node was made just before, if it has one. Later operations without one must not take
            # it for theirs.
            self._forwards.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
            return place
        line = self._line(in_node=True)
        if line is not None:
            # Python that the node runs: a Function's own backward, or a hook.
            return replace(line, backward_of=node.name())
        number = node._sequence_nr()
        forward = None if number == _NO_FORWARD else self._forwards.get(number)
        return replace(forward or self._line() or UNKNOWN, backward_of=node.name())

    def calling(self) -> Place:
        """Return the line that called into torch just now, whatever node is running."""
        return self._line() or UNKNOWN

    def _line(self, in_node: bool = False) -> Place | None:
        """Return the innermost line outside of torch, if any; with `in_node`, only if autograd's node runs it."""
        inner, outer = None, None
        for frame in _frames(sys._getframe(1)):
            file = frame.f_code.co_filename
            if in_node and _ENGINE in frame.f_code.co_names:
                return None
            if not file.startswith(_TORCH):
                outer = frame
                break
            inner = inner or frame
        if outer is None:
            return None
        key = (outer.f_code, outer.f_lineno, inner and inner.f_code, inner.f_lineno if inner else 0)
        place = self._lines.get(key)
        if place is None:
            within = f"torch/{inner.f_code.co_filename.removeprefix(_TORCH)}:{inner.f_lineno}" if inner else ""
            place = self._lines[key] = Place(outer.f_code.co_filename, outer.f_lineno, outer.f_code.co_qualname, within)
        return place


def _frames(frame: FrameType | None) -> Iterator[Any]:
    """Yield frames from the inside out, without observers, Python's own library, and code that has no file."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_BETWEEN) and (not file.startswith(_LIBRARY) or file.startswith(_PACKAGES)):
            yield frame
        frame = frame.f_back


class Sites:
    """Numbers of the places of a step's operations, the same in each step, by the frames that issued them.

    Finer than lines: two calls in one line are two sites, and so is a line that is called from two others. In a
    backward its forward operation counts too. Frames outside of the one that began the step do not count.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        # By code objects and their current instructions, and by the same with each instruction's beginning.
        self._numbers: dict[tuple[int | str, ...], int] = {}
        self._settled: dict[tuple[int | str, ...], int] = {}
        self._starts: dict[int, list[int]] = {}
        # Code objects are told by their addresses, so these must not be used again.
        self._codes: dict[int, CodeType] = {}
        self._lines = Places()
        self._outermost: FrameType | None = None
        self._forwards: dict[int, int] = {}
        self._last_forward = -1

    def begin(self, frame: FrameType) -> None:
        """Begin a step that this frame runs."""
        self._outermost = frame
        self._forwards.clear()
        self._last_forward = -1

    def end(self) -> None:
        self._outermost = None

    def here(self, above: int) -> int:
        """Return the site of the operation that is being dispatched, `above` callers that are not the program's."""
        frames: list[int] = []
        frame: FrameType | None = sys._getframe(1 + above)
        while frame is not None:
            frames += id(frame.f_code), frame.f_lasti
            if frame is self._outermost:
                break
            frame = frame.f_back
        node: Any = torch._C._current_autograd_node()
        if node is None:
            key = tuple(frames)
            site = self._numbers.get(key)
            if site is None:
                site = self._new(key, (), None, above)
            self._forwards.setdefault(torch._C._autograd._get_sequence_nr() - 1, site)
            return site
        number = node._sequence_nr()
        if number != _NO_FORWARD:
            self._last_forward = self._forwards.get(number, -1)
        # What adds to a leaf has no forward: it belongs to the node that ran before.
        of_node = node.name(), self._last_forward
        site = self._numbers.get((*frames, *of_node))
        return self._new(tuple(frames), of_node, node, above) if site is None else site

    def _new(self, frames: tuple[int, ...], of_node: tuple[str | int, ...], node: Any, above: int) -> int:
        """Return the site of a new key: a new place, or a known one that Python reached in a quicker way."""
        frame: FrameType | None = sys._getframe(2 + above)
        while frame is not None:
            self._codes[id(frame.f_code)] = frame.f_code
            frame = frame.f_back
        settled = [
            part for code, at in zip(frames[::2], frames[1::2], strict=True) for part in (code, self._start(code, at))
        ]
        number = self._settled.setdefault((*settled, *of_node), len(self.places))
        if number == len(self.places):
            self.places.append(self._place(node, self._last_forward if node is not None else -1))
        self._numbers[(*frames, *of_node)] = number
        return number

    def _start(self, code: int, at: int) -> int:
        """Return where the running instruction begins: after a few calls, Python calls a property from its end."""
        starts = self._starts.get(code)
        if starts is None:
            starts = self._starts[code] = [
                instruction.offset for instruction in dis.get_instructions(self._codes[code])
            ]
        return starts[bisect.bisect_right(starts, at) - 1]

    def _place(self, node: Any, forward: int) -> Place:
        if node is None:
            return self._lines.calling()
        of_forward = self.places[forward] if forward >= 0 else None
        place = self._lines._line(in_node=True) or of_forward or self._lines.calling()
        return replace(place, backward_of=node.name())
