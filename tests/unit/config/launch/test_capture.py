"""`bpipe capture` runs scripts, and finds what they launch without starting it.

Scripts may call launchers of their own machine: `real/NAME` stands for one, and writes a file `STARTED` if it runs.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.config.launch import stand_in
from bpipe.config.launch.capture import capture
from bpipe.config.launch.stand_in import launch_of_python, slurm_variables

ROOT = Path(__file__).resolve().parents[4]
SIZES = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048"
SIZES += " --micro-batch-size 1 --global-batch-size 16 --vocab-size 32000 --bf16 --pipeline-model-parallel-size 4"
TRAIN = f"torchrun --nproc-per-node 4 pretrain_gpt.py {SIZES}"
LAUNCHERS = ("torchrun", "srun", "mpirun", "docker", "deepspeed", "python3", "python")

# Scripts by name, with the launches that they contain.
SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "eval": (
        f'options=" {SIZES} "\nrun="torchrun --nproc-per-node 4 pretrain_gpt.py ${{options}}"\neval ${{run}}',
        [TRAIN],
    ),
    "arithmetic": (f"TP=$1\nOVERLAP=$(( ($TP > 1) ? 1 : 0 ))\n{TRAIN} --x $OVERLAP", [f"{TRAIN} --x 1"]),
    "condition": (
        f'CMD="python pretrain_gpt.py {SIZES}"\nif [ -n "$NO_KEY" ]; then CMD="$CMD --x"; fi\nsrun bash -c "$CMD"',
        [f"python pretrain_gpt.py {SIZES}"],
    ),
    "case": (f'S=7B\ncase "$S" in\n 7B) L=8 ;;\n 70B) L=80 ;;\nesac\n{TRAIN} --x $L', [f"{TRAIN} --x 8"]),
    "pattern": (
        f"A=(\n  --moe-layer-freq [0]*1+[1]*7\n)\n{TRAIN} ${{A[@]}}",
        [f"{TRAIN} --moe-layer-freq '[0]*1+[1]*7'"],
    ),
    "sourced": (
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\nsource "${HERE}/sizes.sh"\nray start --head\n'
        "ray job submit --address http://127.0.0.1:8265 -- python3 train.py ${SIZES[@]} --bf16",
        ["python train.py --num-layers 8 --bf16"],
    ),
    "unset": (f"{TRAIN} --data-path $DATA_OF_NOBODY", [f"{TRAIN} --data-path"]),
    "quotes": (f"A=('a b' \"c'd\" '')\n{TRAIN} \"${{A[@]}}\" $'t\\tab'", [f"{TRAIN} 'a b' 'c'\"'\"'d' '' 't\tab'"]),
    "function and loop": (
        f'go() {{ "$@" --x $i; }}\nfor i in 1 2; do go {TRAIN}; done',
        [f"{TRAIN} --x 1", f"{TRAIN} --x 2"],
    ),
    "nodes": (
        f'for i in 0 1; do ssh node$i "cd / && {TRAIN.replace("--nproc", "--node_rank $i --nproc")}" & done; wait',
        [TRAIN.replace("--nproc", "--node_rank N --nproc")],
    ),
    "background": (f"nohup {TRAIN} > log 2>&1 &", [TRAIN]),
    "exec": (f"set -euo pipefail\nexec {TRAIN}", [TRAIN]),
    "module": (
        f"python3 -u -m torch.distributed.run --nproc-per-node 4 pretrain_gpt.py {SIZES}",
        [f"python -u -m torch.distributed.run --nproc-per-node 4 pretrain_gpt.py {SIZES}"],
    ),
    "wrappers": (
        "srun -N 2 -p test --mpi=pmix singularity exec --nv -B /data:/data x.sif nsys profile -o out numactl -N 0 "
        f"timeout 9 env A=1 {TRAIN}",
        [TRAIN],
    ),
    "docker": (f'docker pull x\nsudo docker run --rm nvcr.io/nvidia/pytorch:25.01-py3 bash -lc "{TRAIN}"', [TRAIN]),
    "mpirun": (f"mpirun -np 8 -x NCCL_DEBUG ./inner.sh {SIZES}", [f"python pretrain_gpt.py {SIZES}"]),
    "rank of a step": (
        f"srun -N 2 --ntasks-per-node 4 bash -c '{TRAIN} --x $SLURM_PROCID $SLURM_NTASKS'",
        [f"{TRAIN} --x 0 8"],
    ),
    "program of a step": (f"HEAD=$(srun --nodes=1 -w node0 printf %s here)\n{TRAIN} --x $HEAD", [f"{TRAIN} --x here"]),
    "sbatch": (f"ID=$(sbatch --parsable -N 2 job.sbatch 7)\n{TRAIN} --x $ID", [f"{TRAIN} --x 2 7", f"{TRAIN} --x 1"]),
    "sbatch of standard input": (
        f"sbatch <<EOF\n#SBATCH --nodes=4\n{TRAIN} --x \\$SLURM_NNODES\nEOF",
        [f"{TRAIN} --x 4"],
    ),
    "sbatch --wrap": (f'sbatch --wrap "{TRAIN}"', [TRAIN]),
    "other programs": (
        f"V=$(python3 -c 'print(6 * 7)')\npython3 prepare.py --x\n[ -f prepared ] && {TRAIN} --x $V",
        [f"{TRAIN} --x 42"],
    ),
    "tools": (
        f"set -e\nmodule load cuda\npip install x\nN=$(nvidia-smi -L | wc -l)\n{TRAIN} --x $N",
        [f"{TRAIN} --x 8"],
    ),
    # The machine's own launchers, by a virtual environment's folder in PATH or by their paths.
    "path": (
        f"PATH=$PWD/real:$PATH\nexport PATH\n{TRAIN}\n$(which torchrun) pretrain_gpt.py --x",
        [TRAIN, "torchrun pretrain_gpt.py --x"],
    ),
    "absolute": (f'R=$PWD/real\n$R/{TRAIN}\n"$R/mpirun" -np 2 $R/{TRAIN} --x', [TRAIN, f"{TRAIN} --x"]),
    "absolute behind others": (f"A=1 $PWD/real/{TRAIN}\ntimeout 9 $PWD/real/srun {TRAIN} --x", [TRAIN, f"{TRAIN} --x"]),
    "absolute exec": (f"exec $PWD/real/srun {TRAIN}", [TRAIN]),
    "python by its path": (f"{sys.executable} pretrain_gpt.py {SIZES}", [f"python pretrain_gpt.py {SIZES}"]),
    "shim": (
        "echo 'exec $(command -v python3) \"$@\"' > real/python3\nsed -i '1i #!/bin/bash' real/python3\n"
        f"PATH=$PATH:/usr/bin\nexport PATH=$PWD/real:$PATH\nN=$(python3 -c 'print(5)')\n{TRAIN} --x $N",
        [f"{TRAIN} --x 5"],
    ),
    "conda": (
        "echo 'echo export $1=5' > real/conda; sed -i '1i #!/bin/bash' real/conda; chmod +x real/conda\n"
        f"eval $($PWD/real/conda A); conda install x; PATH=$PATH:$PWD/real\neval $(conda B); {TRAIN} --x $A $B",
        [f"{TRAIN} --x 5 5"],
    ),
    "own shell": (f"sh -c 'export PATH=/usr/bin:/bin:$PATH; {TRAIN}'", [TRAIN]),
    "what the guard must not change": (
        "set -eux\nmkdir -p a/b && cd $_\n[[ x7 =~ ([0-9]) ]]\ntrue\nfalse || S=$?\ntrap 'echo bye' EXIT\n"
        f"{TRAIN} --x ${{BASH_REMATCH[1]}} ${{PWD##*/}} $S",
        [f"{TRAIN} --x 7 b 1"],
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that scripts name, without SLURM, and whose folder for stand-ins has to be quoted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "it's"))
    for name in os.environ:
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    (tmp_path / "real").mkdir()
    for name in LAUNCHERS:
        (tmp_path / "real" / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/STARTED\n")
        (tmp_path / "real" / name).chmod(0o755)
    (tmp_path / "sizes.sh").write_text("SIZES=(\n  --num-layers 8\n)\n")
    (tmp_path / "inner.sh").write_text('#!/bin/sh\npython pretrain_gpt.py "$@"\n')
    (tmp_path / "job.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH --nodes=8 # many\n\necho hello\n{TRAIN} --x $SLURM_NNODES $1\n"
    )
    (tmp_path / "prepare.py").write_text("open('prepared', 'w')\n")
    return tmp_path


def captured(script: str, *arguments: str, timeout_s: float = 50.0) -> tuple[list[str], Any]:
    Path("run.sh").write_text(f"#!/bin/bash\n{script}\n")
    result = capture(["bash", "run.sh", *arguments], timeout_s)
    return [shlex.join(launch["words"]) for launch in result.launches], result


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_its_launches_and_starts_none(name: str, place: Path) -> None:
    script, expected = SCRIPTS[name]
    launches, result = captured(script, "2")
    # Nodes are started together, so any of them may be the last.
    assert [re.sub(r"(?<=--node_rank )\d", "N", launch) for launch in launches] == expected, result.last_lines
    assert not (place / "STARTED").exists()
    assert processes_of(place) == []


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes whose working folder is in this one."""
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder) and int(process.name) != os.getpid():
                left.append((process / "cmdline").read_text())
    return left


SBATCH = f"""\
#!/bin/bash
#SBATCH --job-name=llama70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=logs/%x_%j.out
set -euo pipefail
#SBATCH --nodes=99
module load cuda/12.8 || true
source "$HOME/bin/activate"
export CUDA_DEVICE_MAX_CONNECTIONS=1
MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 20000))
model() {{ case "$1" in 70b) ARGS=({SIZES}) ;; *) exit 1 ;; esac; }}
model "${{1:-70b}}"
[[ "${{RECOMPUTE:-}}" == full ]] && ARGS+=(--recompute-granularity full)
MORE=(${{NAME_OF_NOBODY:+--wandb-project "$NAME_OF_NOBODY"}} --data-path $(cat "${{DATA_LIST:-mix.txt}}"))
srun --kill-on-bad-exit=1 bash -c "
    torchrun --nnodes $SLURM_NNODES --nproc-per-node ${{SLURM_GPUS_ON_NODE:-4}} --rdzv-endpoint $MASTER \\
        pretrain_gpt.py ${{ARGS[*]}} ${{MORE[*]}}
"
"""


def test_a_job_of_slurm_runs_on_a_laptop(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader of bash asked for seven variables in two rounds; an activated environment has its own torchrun."""
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("API_KEY", "secret")
    (place / "bin").mkdir()
    (place / "bin/activate").write_text(f"export PATH={place}/real:$PATH\n")
    (place / "mix.txt").write_text("0.5 a 0.5 b\n")
    (place / "train.sbatch").write_text(SBATCH)
    assert main(["capture", "--output", "launch.json", "--", "train.sbatch"]) == 0
    printed = capsys.readouterr()
    expected_command = "torchrun --nnodes 8 --nproc-per-node 8 --rdzv-endpoint node0:20001 pretrain_gpt.py"
    assert printed.out == f"{expected_command} {SIZES} --data-path 0.5 a 0.5 b\n"
    assert "everything in the script runs, but torchrun" in printed.err
    (launch,) = json.loads(Path("launch.json").read_text())["launches"]
    assert launch["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "API_KEY" not in launch["environment"]
    assert main(["simulate", "--cluster", "h100-80g", "--launch", "launch.json"]) == 0
    assert " p=4 d=16 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "more", "message"),
    [
        ("set -u\necho before\necho $UNSET_HERE", (), "run.sh: it ended with status 1, and launched no training"),
        ("echo hello\nexit 3", (), "run.sh: it ended with status 3, and launched no training: see above"),
        ("echo hello\nsleep 50", ("--timeout", "1"), "run.sh: it ran longer than 1 s and was ended, and launched no"),
        ("setsid sleep 50 & env -i sleep 50 &\necho hello; wait", ("--timeout", "1"), "give more time with --timeout"),
    ],
)
def test_a_script_without_a_launch_shows_what_it_printed_last(
    script: str, more: tuple[str, ...], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.sh").write_text(f"{script}\n")
    assert main(["capture", *more, "--", "bash", "run.sh"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert re.search(r"^\| (hello|run.sh: line 3: UNSET_HERE: unbound variable)$", printed, re.MULTILINE)
    assert processes_of(place) == []


def test_what_ran_too_long_keeps_what_it_launched(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.sh").write_text(f"{TRAIN}\nsleep 50\n")
    assert main(["capture", "--timeout", "2", "--", "bash", "run.sh"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{TRAIN}\n"
    assert "it ran longer than 2 s and was ended: further launches are not known" in printed.err


def test_our_examples_are_captured_as_their_dry_run_prints_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for script in ("train_gpt3_13b.sh", "train_gpt3_96b.sbatch"):
        environment = {"DRY_RUN": "1", "PATH": "/usr/bin:/bin"}
        command = ["bash", str(ROOT / "examples" / script)]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        (launch,) = capture(command, 50).launches
        own = shlex.split(printed)
        flags = launch["words"][launch["words"].index("pretrain_gpt.py") :]
        assert flags == own[own.index("pretrain_gpt.py") :]


def test_a_command_that_cannot_run_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, message in (
        ([], "name the command that starts the training after --"),
        (["none.sh"], "none.sh: it ended with status 127"),
        (["no-such-program"], "no-such-program: there is no such file"),
    ):
        assert main(["capture", "--", *command]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-N 4 --ntasks-per-node 8 --gres=gpu:h100:4", "NNODES=4 NTASKS=32 GPUS_ON_NODE=4 JOB_NODELIST=node[0-3]"),
        ("-n64 --ntasks-per-node=8 -G 64", "NNODES=8 NTASKS=64 GPUS_ON_NODE=8 TASKS_PER_NODE=8(x8)"),
        ("--nodes=2-4 -c 12 -J name", "JOB_NUM_NODES=2 NTASKS=2 CPUS_PER_TASK=12 JOB_NAME=name PROCID=0"),
        ("--ntasks 8 --gpus-per-task=1", "NNODES=1 NTASKS=8 GPUS_ON_NODE=8"),
        ("--gpus-per-node=a100:4", "GPUS_PER_NODE=a100:4 GPUS_ON_NODE=4 JOB_ID=1"),
    ],
)
def test_options_set_the_variables_of_slurm(options: str, expected: str, place: Path) -> None:
    variables = slurm_variables(options.split())
    assert {f"SLURM_{pair}" for pair in expected.split()} <= {f"{name}={value}" for name, value in variables.items()}


@pytest.mark.parametrize(
    ("words", "is_launch"),
    [
        ("-u -X dev pretrain_gpt.py", True),
        ("-um torch.distributed.launch x.py", True),
        ("finetune_llama.py", True),
        ("-m my.program --hidden-size=8", True),
        ("-c 'import train' --num-layers 8", False),
        ("- --num-layers 8", False),
        ("preprocess_data.py --tokenizer-type x", False),
        ("-m pip install x", False),
        ("--version", False),
    ],
)
def test_a_training_is_told_from_other_programs(words: str, is_launch: bool) -> None:
    assert (launch_of_python(shlex.split(words)) is not None) == is_launch


def test_any_python_of_a_user_can_import_the_stand_in() -> None:
    ast.parse(Path(stand_in.__file__).read_text(), feature_version=(3, 7))
