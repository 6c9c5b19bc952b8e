"""Find the launches of a training script by running it with stand-ins for launchers.

The shell runs the script, so every variable, condition and function has its true value. PATH begins with a folder of
stand-ins (`stand_in`). Scripts change PATH, and call launchers by their paths: so every bash reads a file at its start
that puts the folder back and turns such paths into functions, and every Python imports the stand-in.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpipe.config.launch import stand_in
from bpipe.values import a_list, a_text, an_object, load_json, printable

# Bash runs this before each simple command. It must change nothing that a script can see, so only a first word of
# plain characters and variables is expanded, without `set -u`, and `set -x` does not show it.
_GUARD = r"""
[[ -z ${BPIPE_CAPTURE_BASH_ENV:-} ]] || source "$BPIPE_CAPTURE_BASH_ENV"
__bpipe_capture() {
    [[ $PATH == "$BPIPE_CAPTURE/bin:"* ]] || PATH=$BPIPE_CAPTURE/bin:$PATH
    local - text=${1#exec } word
    set +u
    while word=${text%%[[:space:]]*}; [[ $word == [A-Za-z_]*=* && $word != "$text" ]]; do
        text=${text#*[[:space:]]}
    done
    [[ $word == *[/$]* && $word != *[!A-Za-z0-9_/.~+\"\$\{\}-]* ]] || return 0
    eval "word=$word" || return 0
    word=${word%%[[:space:]]*}
    [[ $word == */* && $word != "$BPIPE_CAPTURE/"* && -x $BPIPE_CAPTURE/bin/${word##*/} ]] || return 0
    [[ ${word##*/} != @(python*|conda) ]] || return 0
    eval "function $word { \"$BPIPE_CAPTURE/bin/${word##*/}\" \"\$@\"; }"
    [[ $1 != exec\ * ]] || { eval "$text"; exit; }
}
set -o functrace
trap '{ __bpipe_capture "$BASH_COMMAND" "$_"; } 2> /dev/null' DEBUG
"""
# Seconds that background processes get once the script has ended: a launch may be one of them.
_GRACE_S = 10.0
_MOST_LINES = 10


@dataclass(frozen=True, slots=True)
class Capture:
    """What a script launched.

    Attributes:
        launches: Each launch once, as in a file of launches.
        last_lines: The last lines that the script printed.
        status: Its exit status; None if its time ran out.
    """

    launches: list[dict[str, Any]]
    last_lines: list[str]
    status: int | None


def capture(command: Sequence[str], timeout_s: float) -> Capture:
    """Run a command, and note the launches that it would start. None of its processes is left behind."""
    with tempfile.TemporaryDirectory(prefix="bpipe-capture-") as name:
        folder = Path(name)
        # What sbatch would set by the `#SBATCH` lines of a script.
        script = next((Path(word) for word in command if Path(word).is_file()), None)
        options = [] if script is None else stand_in.sbatch_options(script.read_text(errors="replace"))
        environment = {**os.environ, **_install(folder), **stand_in.slurm_variables(options)}
        words = ["bash", *command] if re.search(r"\.(sh|sbatch|slurm)$", command[0]) else list(command)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = None
            try:
                status = process.wait(timeout_s)
                end, looks = time.monotonic() + _GRACE_S, 0
                # A process has no environment for a moment while it becomes another program.
                while looks < 3 and time.monotonic() < end:
                    looks = 0 if _processes(folder) else looks + 1
                    time.sleep(0.05)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _kill(process, folder)
        lines = (folder / "output").read_text(errors="replace").splitlines()
        launches = (folder / "launches").read_text().splitlines() if (folder / "launches").exists() else []
        # Every node of a job launches the same.
        distinct = {
            re.sub(r"--node[-_]rank[ =]\S+", "", " ".join(launch["words"])): launch
            for launch in map(json.loads, launches)
        }
        return Capture(list(distinct.values()), lines[-_MOST_LINES:], status)


def _install(folder: Path) -> dict[str, str]:
    """Write the stand-ins; return the variables by which they are found."""
    shutil.copy(stand_in.__file__, folder / "sitecustomize.py")
    runner, stand_ins = folder / "stand_in", folder / "bin"
    program = shlex.join([sys.executable, "-I", "-S", str(folder / "sitecustomize.py")])
    runner.write_text(f'#!/bin/sh\nexec {program} "$0" "$@"\n')
    runner.chmod(0o700)
    if not os.access(runner, os.X_OK):
        raise ValueError(f"{folder}: programs cannot be run from here: set TMPDIR to a folder where they can")
    stand_ins.mkdir()
    for name in stand_in.NAMES:
        (stand_ins / name).symlink_to(runner)
    (folder / "guard.sh").write_text(_GUARD)
    python_path = os.environ.get("PYTHONPATH")
    return {
        stand_in.FOLDER: str(folder),
        "PATH": f"{stand_ins}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": f"{folder}:{python_path}" if python_path else str(folder),
        "BASH_ENV": str(folder / "guard.sh"),
        "BPIPE_CAPTURE_BASH_ENV": os.environ.get("BASH_ENV", ""),
    }


def _processes(folder: Path) -> list[int]:
    """Return the processes that a capture started, whatever their session or parent is."""
    mark = f"{stand_in.FOLDER}={folder}\0".encode()
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes():
                processes.append(int(process.name))
    return processes


def _kill(process: subprocess.Popen[bytes], folder: Path) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while processes := _processes(folder):
        for identity in processes:
            with suppress(ProcessLookupError):
                os.kill(identity, signal.SIGKILL)
        time.sleep(0.01)


def write_launches(launches: Sequence[dict[str, Any]]) -> str:
    return '{"launches": [\n' + ",\n".join(map(json.dumps, launches)) + "\n]}\n"


def read_launches(text: bytes) -> list[list[str]]:
    """Return the words of each launch in a file. Raises ValueError if it is none."""
    launches = a_list(an_object(load_json(text), "the file").get("launches"), "launches")
    words = [a_list(an_object(launch, "a launch").get("words"), "words") for launch in launches]
    if not words or not all(words):
        raise ValueError("there is no launch, or one without words")
    return [[a_text(word, "a word") for word in launch] for launch in words]


def command_line(launch: dict[str, Any]) -> str:
    return printable(shlex.join(launch["words"]))
