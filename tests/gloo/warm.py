"""Ranks that are forked from a process that has imported torch and Megatron, which takes most of a short run.

A rank is like a new process of `python` in its own session, with the part of subprocess.Popen's interface that tests
use.

There are two parents, and adjacent ranks come from different ones: their strings have different hashes, so code that
depends on the order of a set still differs between ranks. This cannot test the import order of a script, because the
CPU stand-in is already imported. Only the first rank of a script's first run ends with the interpreter's full teardown.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NUM_PARENTS = 2
# Imports of trainings, some of them late.
PRELOADED = (
    *(
        "megatron.training",
        "megatron.training.argument_utils",
        "megatron.training.checkpointing",
        "megatron.training.training",
    ),
    *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.datasets.gpt_dataset", "torch.distributed.checkpoint"),
    *("megatron.core.tokenizers.text.libraries", "megatron.core.models.mimo", "megatron.core.datasets.helpers"),
    *(
        "megatron.scheduling.loop.driver",
        "megatron.scheduling.loop.executor",
        "megatron.scheduling.loop.megatron_loops",
        "megatron.scheduling.record.run_report",
    ),
)


class Rank:
    """A forked process: its parent answers with the process's id, and later with its exit code."""

    def __init__(self, parent: socket.socket, described: Mapping[str, Any]) -> None:
        self.returncode: int | None = None
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(parent, [json.dumps(described).encode()], [theirs.fileno()])
        answer = self._answers.recv(32)
        if not answer:
            raise RuntimeError("the process that imports torch and Megatron has ended: what it said stands above")
        self.pid = int(answer)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(self._answers.recv(32))
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Parents:
    """Parent processes, started with the first rank.

    `stand_in` is the module whose `install` replaces the CUDA runtime there.
    """

    def __init__(self, stand_in: str = "megatron.scheduling.cpu") -> None:
        self._stand_in = stand_in
        self._running: dict[int, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
        self._ended: set[str] = set()

    def start(
        self, number: int, script: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> Rank:
        for index in range(NUM_PARENTS):
            # Start both at once, so that they import in parallel.
            if index not in self._running:
                self._running[index] = self._begin(environment)
        # Readers need not wait for the log to exist.
        log.write_bytes(b"")
        name = next(word for word in script if word != "-m")
        described = {
            "script": script,
            "environment": environment,
            "folder": str(folder),
            "log": str(log),
            "to_the_end": name not in self._ended,
        }
        self._ended.add(name)
        return Rank(self._running[number % NUM_PARENTS][0], described)

    def _begin(self, environment: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), self._stand_in]
            return ours, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)

    def close(self) -> None:
        for connection, process in self._running.values():
            connection.close()
            process.wait(30)
        self._running.clear()


def wait_for_requests(requests: socket.socket) -> dict[str, Any]:
    """Fork for every request, and end when the last client has left; in a rank, return the request."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 1)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not request:
            # There are no ranks left to end.
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as answers:
            if os.fork() == 0:
                requests.close()
                fork_and_tell(answers)
                described: dict[str, Any] = json.loads(request)
                return described


def fork_and_tell(answers: socket.socket) -> None:
    """Report the id of a process and its exit code, and kill it when the client has closed its end.

    Returns only in that process.
    """
    child = os.fork()
    if child:
        ended = os.pidfd_open(child)
        if ended not in select.select([ended, answers], [], [])[0]:
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(OSError):
            answers.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    os.setsid()
    answers.sendall(str(os.getpid()).encode())


def become(described: Mapping[str, Any], left: Mapping[str, str]) -> None:
    """Set up what a new process would find: environment, folder, log, arguments and import paths."""
    os.environ.clear()
    os.environ.update({**left, **described["environment"]})
    os.chdir(described["folder"])
    log = os.open(described["log"], os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if described["to_the_end"]:
        run(described["script"], described["folder"])
    else:
        run_and_leave(described["script"], described["folder"])


def run(script: Sequence[str], folder: str) -> None:
    first, *arguments = script
    if first == "-m":
        sys.argv = arguments
        sys.path[0] = folder
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def run_and_leave(script: Sequence[str], folder: str) -> None:
    """End as the interpreter does, but without tearing down imported modules.

    The teardown writes into memory shared with the parent, which copies it for half a second in every rank.
    """
    code = 0
    try:
        run(script, folder)
    except SystemExit as exit_request:
        if exit_request.code is not None and not isinstance(exit_request.code, int):
            print(exit_request.code, file=sys.stderr)
        code = exit_request.code if isinstance(exit_request.code, int) else int(exit_request.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def remember_docstrings() -> None:
    """Cache the sources of classes, which Megatron's parser reads twice for its flags' help: more than half of a short run."""
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    read: dict[type, dict[str, str]] = {}
    plain = factory._get_field_docstrings

    def docstrings(self: Any, kind: type) -> dict[str, str]:
        if kind not in read:
            read[kind] = plain(self, kind)
        return read[kind]

    factory._get_field_docstrings = docstrings
    arguments.add_megatron_arguments(argparse.ArgumentParser())


def import_all(stand_in: str) -> dict[str, str]:
    """Import, and return the environment variables that this has set."""
    before = dict(os.environ)
    # Imported modules are not garbage, and searching for some takes a tenth of the time.
    gc.disable()
    # As startup.prepare does, which a rank calls when everything is imported.
    os.environ.setdefault("NO_VCS_VERSION", "1")
    importlib.import_module(stand_in).install()
    for name in PRELOADED:
        importlib.import_module(name)
    remember_docstrings()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a forked process has only the thread that forked, and here are {len(threads)}"
    # A collection in a rank would write to the shared memory, and thereby copy it.
    gc.freeze()
    gc.enable()
    return {name: value for name, value in os.environ.items() if name not in before}


if __name__ == "__main__":
    left = import_all(sys.argv[2])
    become(wait_for_requests(socket.socket(fileno=int(sys.argv[1]))), left)
