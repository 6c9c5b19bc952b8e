"""Tell a run that hangs from one that is slow: by what it does, not by how long it takes.

In: what a run has done so far, as a number. Out: nothing while it goes on or waits for a processor, or why it never
will. Devices know at once when nobody can go on (csrc/hosts.h). This is for what they do not see: threads that wait for
each other's locks, and loops without an end.
"""

import os
import threading
import time
from pathlib import Path

SAMPLE_S = 0.5
# So many samples one after the other with nothing done and every thread asleep. A thread that waits for a processor is
# not asleep, so load adds nothing.
ASLEEP = 120
# So many seconds of the process's own processor time with nothing done.
BUSY_S = 300.0


def awake(process: int | str, but: int = 0) -> bool:
    """Return whether a thread of a process, `but` one, runs or waits for a processor or a disk."""
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in "RD" and int(task.name) != but:
            return True
    return False


class Watch:
    """Looks at a run once a sample."""

    def __init__(self, process: int = 0) -> None:
        """`process`: the one that runs, by default this one, in other threads."""
        self._process = process
        self._seen, self._asleep, self._since_s = -1, 0, 0.0

    def hangs(self, done: int) -> str:
        """Return why the run does not go on, or nothing. `done` grows while it does."""
        if done != self._seen:
            self._seen, self._asleep, self._since_s = done, 0, self._spent_s()
        elif awake(self._process or os.getpid(), 0 if self._process else threading.get_native_id()):
            self._asleep = 0
        else:
            self._asleep += 1
        if self._asleep >= ASLEEP:
            return f"nothing was done in {ASLEEP} looks at it, and every thread sleeps"
        if self._spent_s() - self._since_s > BUSY_S:
            return f"nothing was done in {BUSY_S:g} s of processor time"
        return ""

    def _spent_s(self) -> float:
        if not self._process:
            return time.process_time()
        fields = Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
