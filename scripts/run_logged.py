"""Run one command, log its output, show the lines that matter, and leave none of its processes behind.

With --label, one line says how far the command is: the label, what --progress found in the latest line that matches,
written as --as says, and the time. A terminal shows it anew every second; a file gets a line every half minute.

The exit status is the command's. If it fails, the lines of the log that match --causes are repeated, or else its end.
Standard library only, because the set-up uses it before anything is installed. Linux only (prctl and /proc).

A launcher may die before the processes it started. They are adopted by this process, which ends them when the command
has ended. On Ctrl-C, TERM or hang-up it passes the signal on and waits, then ends what is left, then kills what is left
of that. If this process itself is killed, the kernel tells the command.
"""

import argparse
import contextlib
import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

GRACE_S = 5.0
# Watchers of a process, such as Python's own tracker of shared resources, end by themselves just after it.
SETTLING_S = 0.5
TAIL_LINES = 25
# Between two lines of progress, on a terminal and in a file.
TERMINAL_S = 1.0
FILE_S = 30.0
CAUSE_LINES = 8
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None)


@dataclass
class Excerpt:
    """What is repeated if the command fails: lines with the cause, or else the last ones."""

    causes: re.Pattern[str] | None
    found: list[str] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    def add(self, line: str) -> None:
        self.tail.append(line)
        if self.causes and len(self.found) < CAUSE_LINES and self.causes.search(line):
            self.found.append(line)

    def __str__(self) -> str:
        return "\n".join(f"  {line}" for line in self.found or self.tail)


class Progress:
    """One line about a running command, on stderr; none without a label."""

    def __init__(self, label: str, pattern: re.Pattern[str], template: str) -> None:
        self._label = label
        self._pattern = pattern
        self._template = template
        self._state = "starting"
        self._terminal = sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._drawn_s = -math.inf
        # The reader of the output and the main thread both write to the terminal.
        self.lock = threading.Lock()

    def update(self, line: str) -> None:
        """Take over what a line of the command says."""
        if match := self._pattern.search(line):
            self._state = match.expand(self._template)

    def draw(self, last: bool = False) -> None:
        """Write the line, if it is due or the `last` one."""
        now_s = time.monotonic()
        if not self._label or not (last or now_s - self._drawn_s >= (TERMINAL_S if self._terminal else FILE_S)):
            return
        self._drawn_s = now_s
        text = f"{self._label}: {self._state}, {now_s - self._started_s:.0f} s"
        if self._terminal:
            text = f"\r\x1b[K{text[: os.get_terminal_size(sys.stderr.fileno()).columns - 1]}"
        with self.lock:
            print(text, end="" if self._terminal and not last else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Make room for another line."""
        if self._label and self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Stopped(Exception):
    """A signal arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def family() -> dict[int, list[int]]:
    """Return the children of every living process, from /proc."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        # A process may end while it is being read. A zombie is dead, unless only its first thread is: then the process
        # still has its children, and nobody has adopted them yet.
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z" or len(os.listdir(entry / "task")) > 1:
                    below.setdefault(int(parent), []).append(int(entry.name))
    return below


def children(root: int) -> list[int]:
    return family().get(root, [])


def descendants(root: int) -> list[int]:
    """Return all living processes below `root`."""
    children_of = family()
    pids: list[int] = []
    waiting = [root]
    while waiting:
        below = children_of.get(waiting.pop(), [])
        pids += below
        waiting += below
    return pids


def end_all(grace_s: float) -> int:
    """End every process below this one, and return how many there were."""
    left = descendants(os.getpid())
    for pid in left:
        send(pid, signal.SIGTERM)
    wait_until(lambda: not descendants(os.getpid()), grace_s)
    for pid in descendants(os.getpid()):
        send(pid, signal.SIGKILL)
    return len(left)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(condition: Callable[[], bool], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def keep_and_show(
    stream: IO[bytes], log: IO[bytes], pattern: re.Pattern[str], excerpt: Excerpt, progress: Progress
) -> None:
    """Copy the command's output to the log, line by line, and the lines that match to the screen."""
    for raw in stream:
        log.write(raw)
        log.flush()
        line = raw.decode("utf-8", errors="replace").rstrip("\n")
        excerpt.add(line)
        progress.update(line)
        if pattern.search(line):
            with progress.lock:
                progress.clear()
                print(line, flush=True)


def stop(number: int, _frame: FrameType | None) -> None:
    # A second Ctrl-C must not break the clearing-up that the first one started.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


def run(
    log_path: Path,
    pattern: re.Pattern[str],
    causes: re.Pattern[str] | None,
    command: list[str],
    progress: Progress,
    grace_s: float = GRACE_S,
) -> int:
    """Run `command` and return its status, or 128 + n if signal n ended it or this process."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    excerpt = Excerpt(causes)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    # Before the command says anything.
    progress.draw()
    with log_path.open("wb") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )
            assert process.stdout is not None
            reader = threading.Thread(
                target=keep_and_show, args=(process.stdout, log, pattern, excerpt, progress), daemon=True
            )
            reader.start()
            while True:
                progress.draw()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(TERMINAL_S)
                    break
            wait_until(lambda: not descendants(os.getpid()), SETTLING_S)
            left = end_all(grace_s)
            reader.join(grace_s)
            progress.draw(last=True)
        except Stopped as stopped:
            command_itself = set(children(os.getpid()))
            # Ctrl-C goes to the whole group of a terminal, so the command has it already, and a second one would break its
            # clearing-up.
            if stopped.number != signal.SIGINT:
                for pid in command_itself:
                    send(pid, stopped.number)
            wait_until(lambda: command_itself.isdisjoint(children(os.getpid())), grace_s)
            end_all(grace_s)
            progress.clear()
            print(f"stopped by {signal.Signals(stopped.number).name}; all processes ended", file=sys.stderr)
            return 128 + stopped.number
    status = status if status >= 0 else 128 - status
    if left:
        print(f"{left} processes outlived {command[0]} and were ended", file=sys.stderr)
    if status and pattern.pattern:
        part = "from" if excerpt.found else "the end of"
        print(f"{command[0]} ended with status {status}; {part} {log_path}:\n{excerpt}", file=sys.stderr)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--log", type=Path, required=True, help="file for everything the command prints")
    show = "lines to show as they come (default: all; the end of the log is then not repeated)"
    parser.add_argument("--show", default="", metavar="REGEX", help=show)
    repeated = "lines to repeat if the command fails, in place of the end of the log"
    parser.add_argument("--causes", metavar="REGEX", help=repeated)
    parser.add_argument("--label", default="", metavar="TEXT", help="name of the command in a line of its progress")
    parser.add_argument("--progress", default="$^", metavar="REGEX", help="lines that say how far the command is")
    template = r"the progress, with \1 for the first group of REGEX (default: the whole match)"
    parser.add_argument("--as", dest="template", default=r"\g<0>", help=template)
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    causes = re.compile(args.causes) if args.causes else None
    try:
        progress_line = Progress(args.label, re.compile(args.progress), args.template)
        return run(args.log, re.compile(args.show), causes, args.command, progress_line)
    except FileNotFoundError as error:
        print(f"cannot start {args.command[0]}: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
