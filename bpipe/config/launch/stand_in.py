"""Stand in for the launchers of a captured script.

In: a launcher's name and words. Out: a line of the capture's file `launches`, or the command that a wrapper such as
srun would start, run here.

`capture` copies this file into a folder. There it runs under each launcher's name, in front of PATH. Every other
Python that the script starts imports it as `sitecustomize`, and ends if it was to train. So it imports nothing of this
package, and is written for any Python from 3.7 on.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

FOLDER = "BPIPE_CAPTURE"
TRAINERS = ("torchrun", "deepspeed", "accelerate", "msrun", "horovodrun")
# These start whatever program follows; the others below only programs that are stood in for, or a shell.
STARTERS = ("srun", "salloc", "mpirun", "mpiexec", "mpiexec.hydra", "jsrun", "aprun", "numactl", "sudo")
WRAPPERS = (*STARTERS, "singularity", "apptainer", "docker", "podman", "enroot", "nsys", "ncu", "ray", "uv", "conda")
REMOTE = ("ssh", "pdsh")
TRANSPARENT = ("env", "nohup", "timeout", "nice", "setsid", "stdbuf", "taskset", "xargs")
# Those behind `sh` do nothing: packages are not installed, and modules only set where libraries are.
OTHERS = ("sbatch", "scontrol", "nvidia-smi", "sh", "qsub", "bsub", "kubectl", "pip", "pip3", "module", "ml")
PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(7, 16)))
NAMES = (*TRAINERS, *WRAPPERS, *REMOTE, *TRANSPARENT, *OTHERS, *PYTHONS)
MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed")
# What tells a training from other Python programs: the name of its script, or one of these flags.
SCRIPTS = re.compile(r"(pre_?)?train|fine_?tune")
FLAGS = {"--num-layers", "--hidden-size", "--micro-batch-size", "--pipeline-model-parallel-size"}
# Settings that change how a launch runs. The others may be secrets.
SETTINGS = ("CUDA_", "NCCL_", "NVTE_", "PYTORCH_", "TORCH_")
SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "J": "job-name", "p": "partition"}


def write_launch(words: list[str]) -> None:
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    with open(os.path.join(os.environ[FOLDER], "launches"), "a") as file:
        file.write(json.dumps({"words": words, "environment": settings}) + "\n")


def launch_of_python(words: list[str]) -> list[str] | None:
    """Return the launch that is run by `python WORDS`, or None if it is another program."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        if re.match(r"-[A-Za-z]*m$", words[place]):
            break
        if words[place] == "-" or re.match(r"-[A-Za-z]*c$", words[place]):
            return None
        place += 2 if words[place] in ("-X", "-W") else 1
    is_module = place < len(words) and words[place].startswith("-")
    program, rest = (words[place + is_module :] or [""])[0], words[place + is_module + 1 :]
    name = program.split(".")[-1] if is_module else os.path.basename(program)
    if name in TRAINERS and not is_module:
        return [name, *rest]
    trains = SCRIPTS.match(name) or any(word.partition("=")[0] in FLAGS for word in rest)
    return ["python", *words] if trains or (is_module and program in MODULES) else None


def sbatch_options(script: str) -> list[str]:
    """Return the options on the `#SBATCH` lines in front of a script's first command."""
    options: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            options += shlex.split(line[len("#SBATCH") :], comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return options


def slurm_variables(options: list[str]) -> dict[str, str]:
    """Return the variables that SLURM sets for a job or step with these options."""
    given: dict[str, str] = {}
    for option, following in zip(options, [*options[1:], ""]):  # noqa: B905 (strict came with Python 3.10)
        match = re.match(r"(?:--([a-z-]+)|-([NncGJp]))=?(.*)", option)
        if match:
            given[match[1] or SHORT[match[2]]] = match[3] or following
    if not given:
        return {}

    def number(name: str) -> int | None:
        match = re.match(r"(?:.*:)?(\d+)(?:-\d+)?$", given.get(name, ""))
        return int(match[1]) if match else None

    tasks, per_node = number("ntasks"), number("ntasks-per-node")
    nodes = number("nodes") or (math.ceil(tasks / per_node) if tasks and per_node else None)
    nodes = nodes or int(os.environ.get("SLURM_NNODES", "1"))
    tasks = tasks or nodes * (per_node or 1)
    gpus = number("gpus-per-node") or number("gres") or (number("gpus") or 0) // nodes
    gpus = gpus or (number("gpus-per-task") or 0) * math.ceil(tasks / nodes)
    hosts = "node0" if nodes == 1 else f"node[0-{nodes - 1}]"
    values = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(tasks)),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), hosts),
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), os.environ.get("SLURM_JOB_ID", "1")),
        **dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"), "0"),
        "SLURM_TASKS_PER_NODE": f"{math.ceil(tasks / nodes)}(x{nodes})",
        "SLURM_NTASKS_PER_NODE": str(per_node or ""),
        "SLURM_GPUS_PER_NODE": given.get("gpus-per-node", ""),
        "SLURM_GPUS_ON_NODE": str(gpus or ""),
        "SLURM_CPUS_PER_TASK": given.get("cpus-per-task", ""),
        "SLURM_JOB_NAME": given.get("job-name", ""),
        "SLURM_JOB_PARTITION": given.get("partition", ""),
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURMD_NODENAME": "node0",
    }
    return {name: value for name, value in values.items() if value}


def stand_in(program: str, words: list[str]) -> None:
    """Do what the launcher would do, but start no training."""
    name = os.path.basename(program)
    if name in TRAINERS:
        write_launch([name, *words])
    elif name in PYTHONS:
        launch = launch_of_python(words)
        write_launch(launch) if launch else run(program, words)
    elif name in TRANSPARENT:
        # By its bare name, a launcher is found here.
        run(name, [os.path.basename(word) if _stands_for(word) else word for word in words])
    elif name in WRAPPERS or name in REMOTE:
        run_inner(name, words)
    elif name == "sbatch":
        submit(words)
    elif name == "sh":
        os.execvp("bash", ["bash", *words])
    elif name == "scontrol" and words[:1] == ["show"] and words[1:2] in (["hostnames"], ["hostname"]):
        print("\n".join(f"node{node}" for node in range(int(os.environ.get("SLURM_NNODES", "1")))))
    elif name == "nvidia-smi":
        gpus = os.environ.get("SLURM_GPUS_ON_NODE")
        if gpus is None and real(name):
            run(name, words)
        count = int(gpus or 8)
        listed = any(word in ("-L", "--list-gpus") for word in words)
        rows = [f"GPU {gpu}: NVIDIA H100 80GB HBM3" if listed else "NVIDIA H100 80GB HBM3" for gpu in range(count)]
        print("\n".join([str(count)] * count if "--query-gpu=count" in words else rows))
    else:
        print("not started:", name, *words, file=sys.stderr)


def _stands_for(word: str) -> bool:
    name = os.path.basename(word)
    return "/" in word and name in NAMES and name not in PYTHONS


def real(name: str) -> str | None:
    """Return the path of the program itself, if it is installed.

    A shim, such as pyenv's, looks for the program behind it on PATH and finds this file again, in the same process. So
    what this process ran before is passed over.
    """
    passed = [os.path.join(os.environ[FOLDER], "bin", name), *_tried()]
    paths = (os.path.join(folder, name) for folder in os.get_exec_path())
    return next((path for path in paths if path not in passed and shutil.which(path)), None)


def _tried() -> list[str]:
    process, *paths = os.environ.get("BPIPE_CAPTURE_TRIED", "").split(os.pathsep)
    return paths if process == str(os.getpid()) else []


def run(program: str, words: list[str]) -> None:
    path = program if "/" in program else real(program) or (sys.executable if program in PYTHONS else None)
    if path is None:
        sys.exit(f"{program}: command not found")
    os.environ["BPIPE_CAPTURE_TRIED"] = os.pathsep.join([str(os.getpid()), *_tried(), path])
    os.execv(path, [path, *words])


def run_inner(name: str, words: list[str]) -> None:
    """Run the command that is among a wrapper's words."""
    for place, word in enumerate(words):
        program = os.path.basename(word)
        if program in NAMES or program == "bash" or word.endswith((".sh", ".sbatch", ".slurm")):
            start(name, words[:place], words[place:])
        if name in (*REMOTE, "ray") and re.search(r"^(?!\{).*(bash|sh|python3?|torchrun) ", word, re.DOTALL):
            os.execvp("bash", ["bash", "-c", " ".join(words[place:])])
    if name in STARTERS:
        programs = [place for place, word in enumerate(words) if shutil.which(word)]
        # An option's value may have the name of a program, such as `-p test`.
        free = [place for place in programs if not place or not re.match(r"-[^=]*$", words[place - 1])]
        for place in free or programs:
            start(name, words[:place], words[place:])
    # Activating an environment needs conda itself.
    if name == "conda" and real(name) and words[:1] not in (["install"], ["create"], ["update"]):
        run(name, words)
    print("not started:", name, *words, file=sys.stderr)


def start(name: str, options: list[str], command: list[str]) -> None:
    if name in ("srun", "salloc"):
        os.environ.update(slurm_variables(options))
    program = os.path.basename(command[0])
    if program in NAMES:
        stand_in(command[0], command[1:])
    elif command[0].endswith((".sh", ".sbatch", ".slurm")):
        os.execvp("bash", ["bash", *command])
    else:
        os.execvp(command[0], command)
    sys.exit(0)


def submit(words: list[str]) -> None:
    """Run an sbatch script, which is named, given by --wrap or on standard input."""
    place = next((place for place, word in enumerate(words) if os.path.isfile(word)), len(words))
    wrap = next((place for place, word in enumerate(words) if word.startswith("--wrap")), None)
    if wrap is not None:
        script = words[wrap].partition("=")[2] or words[wrap + 1]
        command = ["bash", "-c", script]
    elif words[place:]:
        with open(words[place]) as file:
            script = file.read()
        command = ["bash", *words[place:]]
    else:
        script = sys.stdin.read()
        command = ["bash", "-c", script]
    os.environ.update(slurm_variables([*sbatch_options(script), *words[:place]]))
    subprocess.call(command, stdout=sys.stderr)
    print("1" if "--parsable" in words else "Submitted batch job 1")


if __name__ == "__main__":
    stand_in(os.path.basename(sys.argv[1]), sys.argv[2:])
elif __name__ == "sitecustomize" and FOLDER in os.environ:
    with open("/proc/self/cmdline") as cmdline:
        launched = launch_of_python(cmdline.read().split("\0")[1:-1])
    if launched:
        write_launch(launched)
        os._exit(0)
