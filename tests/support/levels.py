"""Levels of waiting that every plan of ours has to stand.

In: nothing. Out: all but that of CUDA_LAUNCH_BLOCKING=1, under which our own loop's receives hold their host.
"""

from bpipe.schedule.check.deadlock import WaitLevel

STOOD = tuple(waits for waits in WaitLevel if waits <= WaitLevel.ONE_QUEUE)
