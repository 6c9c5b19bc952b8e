"""Launch scripts, read without running them: our own examples, scripts as they are usual, and what cannot be known
is named."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.launch.launch_script import read_launch
from bpipe.launch.megatron_command import read_command

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

# As the scripts of Megatron's examples are written: arrays, arithmetic, positional parameters, unquoted expansions.
ARRAYS = """
#!/bin/bash
# Trains a 175B model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-16}   # nodes
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<where>
DATA_PATH=$2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr "$(hostname)"
)
GPT_MODEL_ARGS=(
    --num-layers 96 # deep
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
)
GPT_MODEL_ARGS+=(--max-position-embeddings 2048)
TRAINING="--micro-batch-size 1 --global-batch-size $((WORLD_SIZE * 12)) --bf16"
cat > ds.json <<EOF
--num-layers 3 pretrain_gpt.py
EOF
mkdir -p "$CHECKPOINT_PATH" && echo "starting" > log.txt 2>&1

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    $TRAINING --data-path $DATA_PATH --vocab-size 51200 \\
    --save "$CHECKPOINT_PATH" 2>&1 | tee train.log
"""

# As SLURM scripts are: the whole command in a string, handed to a shell on every node.
STRING = """
#SBATCH --nodes=4
DIR=`pwd`
options=" \\
    --num-layers 32 --hidden-size 4096 \\
    --num-attention-heads 32 --seq-length 4096 \\
    --swiglu --normalization RMSNorm \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 \\
    --micro-batch-size 2 --global-batch-size 128 --vocab-size 32000"
run_cmd="python -u ${DIR}/pretrain_gpt.py ${options}"
srun -l --output=$DIR/logs/%x.log sh -c "${run_cmd}"
set +x
"""


def test_arrays_arithmetic_and_continued_lines() -> None:
    launch = read_launch(ARRAYS)
    known = [word for word in launch.words if launch.unknown(word) is None]
    wanted = "torchrun --nproc_per_node 8 --nnodes 16 --master_addr pretrain_gpt.py --num-layers 96 --hidden-size 12288"
    wanted += (
        " --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 "
        "--global-batch-size 1536"
    )
    assert known == [*wanted.split(), "--bf16", "--data-path", "--vocab-size", "51200", "--save"]
    assert launch.line == ARRAYS[: ARRAYS.index("torchrun ")].count("\n") + 1
    reading = read_command(launch.words, launch.unknown)
    assert reading.devices == (16, 8)
    assert (reading.options["num_layers"], reading.options["global_batch"]) == (96, 1536)
    assert reading.not_considered == ()


def test_a_command_in_a_string() -> None:
    launch = read_launch(STRING)
    reading = read_command(launch.words, launch.unknown)
    assert reading.options["ffn_hidden_size"] == int(4 * 4096 * 2 / 3 / 64) * 64
    assert (reading.options["tensor"], reading.options["pipeline"], reading.options["rms_norm"]) == (2, 4, True)
    assert reading.devices is None


@pytest.mark.parametrize(
    "name", ["train_gpt3_13b.sh", "train_gpt3_96b.sbatch", "train_gpt3_134b.sbatch", "train_llama_65b.sbatch"]
)
def test_our_examples_name_what_another_file_sets(name: str) -> None:
    """Functions of common.sh set two arrays; with them said, the words are those that the script itself would run."""
    text = (EXAMPLES / name).read_text()
    launch = read_launch(text)
    with pytest.raises(
        ValueError, match=r"DATA_ARGS is not set in the script .*CHECKPOINT_ARGS is not set.*--set NAME=VALUE"
    ):
        read_command(launch.words, launch.unknown)
    environment = {"DRY_RUN": "1", "PATH": "/usr/bin:/bin"}
    printed = subprocess.run(["bash", EXAMPLES / name], env=environment, capture_output=True, text=True, check=True)
    own = shlex.split(printed.stdout)
    data = own[own.index("--mock-data") : own.index("--save")]
    saved = own[own.index("--save") : own.index("--log-interval")]
    given = {
        "DATA_ARGS": shlex.join(data),
        "CHECKPOINT_ARGS": shlex.join(saved),
        "SRUN_ARGS": "",
        "DISTRIBUTED_ARGS": "",
    }
    launch = read_launch(text, given)
    unknown = {launch.unknown(word) for word in launch.words} - {None}
    assert all(re.match("(TRAIN_ITERS|EXIT_MINUTES) may be set", str(reason)) for reason in unknown), (
        "by the file's functions"
    )
    assert read_command(launch.words, launch.unknown).options == read_command(own).options
    launch = read_launch(text, {**given, "TRAIN_ITERS": "50000", "EXIT_MINUTES": "225"})
    flags = list(launch.words[launch.words.index("pretrain_gpt.py") :])
    assert flags == own[own.index("pretrain_gpt.py") :]
    assert read_command(launch.words, launch.unknown).options == read_command(own).options
    # What a dry run prints is a script, too.
    assert list(read_launch(printed.stdout).words) == own


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "no command with a script"),
        ("python a.py --num-layers 2\npython b.py --num-layers 3", "2 training runs, on lines 1, 2"),
        ('A="x\npython a.py --num-layers 2', "line 1: .* is not closed"),
        ("cat <<END\nx\npython a.py --num-layers 2", "here-document up to END has no end"),
    ],
)
def test_scripts_without_one_training_are_refused(script: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_launch(script)


REST = "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 128"


@pytest.mark.parametrize(
    ("before", "flags", "message"),
    [
        ("", "--num-layers $LAYERS", r"LAYERS is not set in the script \(line 2\)"),
        (
            "LAYERS=$(nvidia-smi -L | wc -l)",
            "--num-layers $LAYERS",
            r"the output of \$\(nvidia-smi -L | wc -l\) on line 1",
        ),
        (
            'if [ -n "$BIG" ]; then LAYERS=8; else LAYERS=4; fi',
            "--num-layers $LAYERS",
            "LAYERS is set on line 1, under a condition",
        ),
        ("for LAYERS in 2 4; do :; done", "--num-layers $LAYERS", "LAYERS runs through a loop on line 1"),
        (
            "set_up() { LAYERS=8; }",
            "--num-layers $LAYERS",
            "LAYERS is set on line 1, under a condition, in a loop or in a function",
        ),
        ("[[ -n $BIG ]] && LAYERS=8", "--num-layers $LAYERS", "LAYERS is set on line 1, under a condition"),
        ("LAYERS=4\ntest $BIG || LAYERS=8", "--num-layers $LAYERS", "LAYERS is set on line 2, under a condition"),
        ("LAYERS=4\nread LAYERS", "--num-layers $LAYERS", "LAYERS is set on line 2 by read"),
        ("LAYERS=4\nunset LAYERS", "--num-layers $LAYERS", "LAYERS is set on line 2 by unset"),
        ("", "--num-layers $3", r"\$3 is not set in the script"),
        ("", '--num-layers 2 "${MORE[@]}"', "MORE is not set"),
        ("", "--num-layers 2 --mock-data $MORE", "MORE is not set"),
        ("", "--num-layers 2 --save $A $B", "B is not set"),
        ("", "--num-layers ${LAYERS##*x}", "LAYERS##"),
    ],
)
def test_what_only_running_it_would_tell_is_named_with_its_line(before: str, flags: str, message: str) -> None:
    launch = read_launch(f"{before}\ntorchrun pretrain_gpt.py {REST} {flags}")
    with pytest.raises(ValueError, match=message):
        read_command(launch.words, launch.unknown)


def test_what_is_unknown_and_does_not_matter_is_no_obstacle() -> None:
    launch = read_launch(
        f'torchrun pretrain_gpt.py {REST} --num-layers 2 --save "$OUT/a" --load $IN --lr $(cat lr) "$@"'
    )
    assert read_command(launch.words, launch.unknown).options["num_layers"] == 2


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ('L=(--lr 1)\nif [ -n "$BIG" ]; then L+=(--bf16); fi\nL+=(--clip-grad 1)', '"${L[@]}"'),
        ('L="--lr 1"\nfor i in 1 2; do L="$L --tag $i"; done\nL+=" --clip-grad 1"', "$L"),
    ],
)
def test_of_what_may_have_more_words_those_before_and_behind_are_known(before: str, words: str) -> None:
    launch = read_launch(f"{before}\n{LAUNCH} 2 {words}")
    *_, flag, value, more, last, _ = launch.words
    assert (flag, value, last) == ("--lr", "1", "--clip-grad")
    assert re.match("L is set on line 2, under a condition", str(launch.unknown(more)))


def test_an_element_or_a_sum_makes_unknown_what_it_sets_alone() -> None:
    launch = read_launch(f"N=2 M=3 L=(x y)\nL[1]=z; ((M++))\n{LAUNCH} $N $M ${{L[@]}}")
    assert launch.words[-3] == "2"
    assert [launch.unknown(word) for word in launch.words[-2:]] == [
        "M may be set on line 2 by ((...))",
        "L has an element that is set on line 2",
    ]


def test_commands_in_brackets_may_hold_what_a_script_may() -> None:
    inner = "case x in a) b ;; esac # )\ncat <<END\n)\nEND\n"
    assert read_launch(f"A=$({inner})\n{LAUNCH} 2").words[-1] == "2"


def test_what_is_given_replaces_what_the_script_says() -> None:
    script = f"LAYERS=4\nif true; then LAYERS=6; fi\ntorchrun pretrain_gpt.py {REST} --num-layers $LAYERS ${{MORE}}"
    launch = read_launch(script, {"LAYERS": "8", "MORE": "--bf16 --swiglu"})
    options = read_command(launch.words, launch.unknown).options
    assert (options["num_layers"], options["precision"], options["swiglu"]) == (8, "bf16", True)


def test_a_script_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    launch = read_launch(
        f"touch {mark}\nX=$(touch {mark})\nY=`touch {mark}`\ntorchrun pretrain_gpt.py {REST} --num-layers 2 --save $X"
    )
    assert read_command(launch.words, launch.unknown).options["num_layers"] == 2
    assert not mark.exists()


NAMES = st.sampled_from(["A", "B", "C"])
TEXT = st.text("ab1 -", max_size=4)


@st.composite
def words(draw: st.DrawFn) -> str:
    """One word of bash: plain, quoted either way, escaped, or a variable in each of its spellings."""
    name, text = draw(NAMES), draw(TEXT)
    pieces = [
        text.replace(" ", ""),
        f"'{text}'",
        f'"{text}"',
        "\\ ",
        f"${name}",
        f'"${name}"',
        f"${{{name}}}",
        f'"${{{name}}}{text}"',
        f"${{{name}:-{text.strip() or 'd'}}}",
        f'"${{{name}:-{text}}}"',
        f'"${{{name}-{text}}}"',
        f"${{{name}:+x{text.strip()}}}",
        '"${L[@]}"',
        "${L[@]}",
        '"${L[*]}"',
        "$((2 * (3 + 4) - 1))",
        '"$@"',
    ]
    word = "".join(draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=3)))
    # What follows a bare name must not make it another's, which nobody has set.
    return re.sub(r"\$([ABC])(?=\w)", r"${\1}", word)


@st.composite
def scripts(draw: st.DrawFn) -> str:
    lines = ["A=", "B=b", "C='c  c'", "L=()"]
    for _ in range(draw(st.integers(0, 6))):
        name, word = draw(NAMES), draw(words())
        lines.append(
            draw(
                st.sampled_from(
                    [
                        f"{name}={word}",
                        f"{name}+={word}",
                        f"export {name}={word}  # {word.replace(chr(39), '')}",
                        f"L=({word} {draw(words())})",
                        f"L+=(\n  {word} # {word.count('a')}\n  x\n)",
                        f"{name}={word}; B=${{B}}\\\nz",
                    ]
                )
            )
        )
    return "\n".join(
        [
            *lines,
            f"torchrun a.py --num-layers 1 {' '.join(draw(st.lists(words(), max_size=4)))} \\\n  $C end > /dev/stderr",
        ]
    )


@settings(deadline=None, max_examples=120)
@given(scripts())
def test_words_are_those_of_bash(script: str) -> None:
    """Bash itself is the oracle: a function in place of torchrun prints what it was given."""
    stub = "torchrun() { printf '%s\\0' \"$@\" >&3; }\n"
    with tempfile.TemporaryFile() as printed:
        command = ["bash", "--norc", "-c", f"exec 3>&{printed.fileno()}\n{stub}{script}"]
        environment = {"PATH": "/usr/bin:/bin"}
        ended = subprocess.run(
            command, env=environment, capture_output=True, check=False, pass_fds=(printed.fileno(),), timeout=20
        )
        assert ended.returncode == 0, ended.stderr
        printed.seek(0)
        wanted = printed.read().decode().split("\0")[:-1]
    launch = read_launch(script)
    assert list(launch.words) == ["torchrun", *wanted]


LAUNCH = f"torchrun pretrain_gpt.py {REST} --num-layers"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            f"X={'$(' * 3000}{')' * 3000}\n{LAUNCH} 2",
            "line 1: quotes and brackets are nested more than 40 deep",
        ),
        (
            f"X={'${X:-' * 3000}{'}' * 3000}\n{LAUNCH} 2",
            "line 1: quotes and brackets are nested more than 40 deep",
        ),
        (
            f"X=$(({'$((' * 3000}{'))' * 3000}))\n{LAUNCH} 2",
            "line 1: quotes and brackets are nested more than 40 deep",
        ),
        ("eval " * 3000 + f"{LAUNCH} 2", "line 1: commands in strings are nested more than 10 deep"),
        (
            "A=xy\n" + 'A="$A$A"\n' * 100 + f"{LAUNCH} 2",
            "line 2[0-9]: the script's variables have more than 20000000 characters",
        ),
        (
            "A=(x y)\n" + 'A+=("${A[@]}")\n' * 100 + f"{LAUNCH} 2",
            "line 2[0-9]: the script's variables have more than",
        ),
        (f"A=x\nA={'$A' * 1000}\nB={'$A' * 100_000}\n{LAUNCH} 2", "line 3: the script's variables have more than"),
        (f"N=2\r\n{LAUNCH} $N\r\n", "line 1: Windows line ends"),
        (f"N=2\n{LAUNCH} \0000\0", "line 2: a zero byte"),
        ("#" * 1_000_001, "it has more than 1000000 characters, more than any launch"),
        (f"cat <<END\na\\\nEND\n{LAUNCH} 2\nEND", "line 3: a here-document's last line continues into its end"),
        (
            f"f() {{ {LAUNCH} 2; }}\nf",
            "line 1: the training command is in a function, .* Print the command with echo, and give it after --",
        ),
        (f"{{ if true; then\n{LAUNCH} 2\n", "line 3: the script ends before fi"),
        (f"fi\n{LAUNCH} 2", "line 1: fi is unexpected"),
        (
            f"A=(a b)\nA+=' --bf16'\n{LAUNCH} 2 $A",
            r"line 2: A is an array, of which this sets the first word alone: write A\+=\(...\)",
        ),
    ],
)
def test_what_is_not_read_is_an_error_at_its_line(script: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_launch(script)


def test_characters_of_private_use_are_characters() -> None:
    """They once marked what is unknown, so a script that held them ended in a traceback."""
    launch = read_launch(f"{LAUNCH} 2 --save \ue0007\ue001")
    assert launch.words[-1] == "\ue0007\ue001"
    assert not any(map(launch.unknown, launch.words))


SLOW = (
    "A+=(x)",
    "echo $N",
    "if true; then N=3; fi",
    "f() { N=2; }",
    "unknown $N",
    "echo }}}}}}}}",
    "eval 'N=5'",
    "# x",
)


@pytest.mark.parametrize(
    "line", ["N=4", "source x", "B=$(x `y`)", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_long_scripts_take_linear_time(line: str) -> None:
    """A hundred thousand lines once took time by their square.

    Seconds are bounded loosely; the square of it is minutes.
    """
    text = f"A=()\n{(line + chr(10)) * min(100_000, 900_000 // (len(line) + 1))}{LAUNCH} 2"
    begin = time.monotonic()
    assert read_launch(text).words[-1] == "2"
    assert time.monotonic() - begin < 30
