"""Draw bash scripts that start a training, and say what bash itself hands to it.

In: a source of chance. Out: a script; its words.

The scripts have what launch scripts have, and beside it what can change a variable in a way that is easily overlooked.
Knows no reader.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

BASH = Path("/bin/bash")

# A line each; ¶ is a newline, §s a scalar's name, §n any variable's, §t a text, §w a word, §a arithmetic, §d a default.
_LINES = r"""
§s=§w
§s=§w
§s=§w
§s=§t
§s="$A §t"
§s=$B
§s+=§w
§s=1
§s=16
export §s=§w
L=(§w §w)
L=($A "$B" §w)
L+=(§w)
L+=(§t "§t")
L=(¶  §w # no¶  z¶)
§s=1 §s=$§s
§s=$((§a))
K+=(§w)
K=("${L[@]}")
: ${§s:=§w}
: "${U:=4}"
echo §w >/dev/null
mkdir -p x && echo made
cat <<END¶$N '¶END
cat <<'END' >/dev/null¶${N:=3} $((N++))¶END
# §s=3
set -e
set -euo pipefail
readonly §s
unset §s
§s=3 >/dev/null
[ -n "$A" ] && echo yes
if [ $N = 8 ]; then echo yes; else echo no; fi
for i in 1 2; do echo $i; done
f() { echo "$@"; }; f 1
N=5 \¶# no¶M=4
"""
_CONDITIONAL = r"""
[ -n "$A" ] && §s=4
if [ $N = 8 ]; then §s=5; else §s=6; fi
for §s in 1 2; do :; done
case $A in a) §s=7 ;; *) §s=9;; esac
f() { §s=10; }
f() { §s=10; }; f
f() { local N=3; }; f
f() ( N=35 ); f
function f { N=34; }; f
N=21; f() { N=22; }; f | cat
while false; do §s=3; done
until N=41; do :; done
§s=3 | cat
§s=3 &¶wait
( §s=3 )
{ §s=3; }
§s=3 || true
true || §s=3
false && §s=3
true && §s=3
true \¶&& N=50
true &&¶N=51
[ 1 -eq 2 ] ||¶N=57
! §s=3
time N=30
N=44; { N=45; } | cat
[[ -v N ]] && N=29
[[ $N -eq 8 ]] && M=1
(( N > 3 )) && M=2
if ((N > 3)); then M=2; fi
[ -n "$A" ] && L+=(§w)
if false; then L+=(§w §w); fi; K=("${L[@]}" §w)
if true; then L=("${L[@]}" §w); fi; B="${L[*]}"
for i in 1 2; do L+=($i §w); done; K=("${L[@]}"§w)
if true; then §s+=" §t"; fi; K=($A "$B")
if false; then §s="$§s §w"; fi; A="$B"§w
"""
_ODD = r"""
((§s*=2))
((N++))
let N=N+1
let 'N*=2'
A[0]=q
L[1]=q
L[5]=q
declare -i §s=3+4
declare -r §s=3
declare §s=§w
typeset N=9
declare -a L=(p q)
declare -l A=ABC
declare N
§s=x true
§s=x :
N=42 M=43 true
§s=x eval ':'
§s=$'a\nb'
A=q; L=r
L+=s
IFS=,
IFS=: read -r A B <<< 'p:q'
read N <<< 5
printf -v N 6
printf '%s' §s >/dev/null
mapfile -t L < /dev/null
getopts a N
eval N=12
eval "§s=13"
eval 'f() { N=14; }'; f
source /dev/null
. /dev/null
set -- p q
set -f
set -a
set -k
set -u
shopt -s nullglob
trap 'N=15' DEBUG
trap 'N=16' EXIT
unset 'L[0]'
unset -f N
N=08
N=010
export N
export -n N
readonly N=17
N=${N}0
B='N=18'; (( B )) || true
B='N=19'; [[ $B -eq 1 ]] || true
B='N=20'; A=$((B))
for ((N=0;N<3;N++)); do :; done
command eval N=23
CMD='export N=24'; $CMD
CMD=let; $CMD N=25
"export" N=26
\export N=27
X=export; $X N=28
alias torchrun=echo
torchrun() { echo no; }
exit 0
exec 3>&1
coproc N=31
select N in 1; do break; done < /dev/null
N=32; local N=33
local N
if ((N=36)); then :; fi
echo $((N=37)) >/dev/null
: ${A:$((N=38)):1}
cat <<E¶$((N=39))¶E
echo >/dev/null ${Q:=40}; N=$Q
cd /; N=$PWD
SECONDS=46; N=$SECONDS
RANDOM=1; N=$RANDOM
N=${BASH_VERSION:-47}
N=${HOME:-48}
N=${LINENO}
_=49; N=$_
N='5¶4'
N="5¶5"
N=5\¶6
N=$(N=58; echo $N)
: $(N=59)
N=7/2; N=$((N))
N=$((-7 / 2))
N=$((7 / -2 % 4))
"""
_PIECES = r"""
x
--flag
'§t'
"§t"
x\ y
${§n}
"${§n}"
"${§n}§t"
"$A"
$N
${§n§o§d}
"${§n§o§t}"
"${U§o§t}"
${U§o§d}
"${L[@]}"
${L[@]}
"${L[*]}"
${L[*]}
"${K[@]}"
${K[@]}
"$@"
"$*"
${1:-one}
$((§a))
"$((§a))"
\*
'*'
\¶z
a\¶
x#y
"\$N"
"\q"
\q
${L[@]+"${L[@]}"}
${K[@]-none}
a=b
%
"""
_ODD_PIECES = r"""
${L[1]}
$1
$#
$'a\tb'
$"x"
$(echo 7)
`echo 7`
${#A}
${A%a}
${B/b/q}
${A^^}
${!A}
${L[@]:1}
*
[ab]
a?
{a,b}
{1..3}
~
x=~
#
$
"$"
}
!
=
"${A:-"q r"}"
"${A:+'q'}"
<(true)
"""
_LAUNCHES = r"""
srun §l
X=1 §l
§l 2>&1 | cat
true && §l
( §l )
exec §l
CMD="§q"; $CMD
CMD="§q"; eval $CMD
CMD="§q"¶srun sh -c "$CMD"
bash -c '§a1'
if true; then §l; fi
run() { "$@" --more; }; run §l
run() { §l; }; N=5; run
for N in 4 5; do §l; done
CMD=(§l); "${CMD[@]}"
export N; bash -c '§a1'
"""


def _rows(text: str) -> list[str]:
    return [row.replace("¶", "\n") for row in text.strip("\n").split("\n")]


LINES, CONDITIONAL, ODD = map(_rows, (_LINES, _CONDITIONAL, _ODD))
PIECES, ODD_PIECES, LAUNCHES = map(_rows, (_PIECES, _ODD_PIECES, _LAUNCHES))
TEXTS = ("a", "1", "-b", "x y", "  ", "", "a b ", " c", "8", "N=9", "\u00a0", "\ue0000\ue001", "é")
DEFAULTS = ("${A}", "$B", "d", "'q r'", "${M:-2}", "${L[@]}", "$((N+1))", '"$B"', "a b")
OPERATORS = (":-", "-", ":+", "+", ":=", "=", ":?")
SUMS = ("§i + §i", "§i - §i", "§i * §i", "§i / §i", "§i % §i", "(§i + §i) * 2", "-§i / 2", "§i/§i", "§i*(§i-§i)")
ODD_SUMS = (
    "N++",
    "N *= 2",
    "N=5",
    "B",
    "§i ? 2 : 3",
    "010 + 1",
    "N == M",
    "",
    "§i ** §i",
    "§i < §i",
    "§i << 2",
    "§i && §i",
    "$N+$N++1",
)
NUMBERS = ("N", "M", "2", "7", "-3", "$N", "${M}", "0")


class Script:
    """One script; `odd` is how likely a part of it is one that a reader easily takes for another."""

    def __init__(self, rng: random.Random, odd: float) -> None:
        self._rng, self._odd = rng, odd

    def draw(self) -> str:
        lines = ["A=a B='b  c' N=8 M=3", "L=(x 'y z')", "K=()"]
        for _ in range(self._rng.randint(1, 5)):
            rows = self._rng.choice((ODD, CONDITIONAL)) if self._is_odd() else LINES
            lines.append(self._filled(self._rng.choice(rows)))
        layers = self._rng.choice(("$N", "1", "$((N * 2))", "${N}", "$M"))
        launch = f"torchrun a.py --num-layers {layers} {' '.join(self._word() for _ in range(self._rng.randint(0, 3)))}"
        if self._rng.random() < 0.4:
            row = (
                self._rng.choice(LAUNCHES)
                .replace("§q", launch.replace('"', ""))
                .replace("§a1", launch.replace("'", ""))
            )
            launch = row.replace("§l", launch)
        lines += [launch, self._rng.choice(("", "N=77", "exit"))]
        return "\n".join(lines) + "\n"

    def _is_odd(self) -> bool:
        return self._rng.random() < self._odd

    def _word(self) -> str:
        pieces = (
            self._filled(self._rng.choice(ODD_PIECES if self._is_odd() else PIECES))
            for _ in range(self._rng.choice((1, 1, 1, 2, 3)))
        )
        # What follows a bare name must not make it another's, which nobody has set.
        return re.sub(r"\$([ABNM])(?=\w)", r"${\1}", "".join(pieces))

    def _filled(self, row: str) -> str:
        for _ in range(4):
            row = re.sub("§[snotwaid]", self._part, row)
        return row

    def _part(self, found: re.Match[str]) -> str:
        choices = {"s": "ABNM", "n": "ABNMLK", "o": OPERATORS, "t": TEXTS, "d": DEFAULTS, "i": NUMBERS}
        kind = found[0][1]
        if kind == "w":
            return self._word()
        return self._rng.choice((ODD_SUMS if self._is_odd() else SUMS) if kind == "a" else choices[kind])


def stubs(folder: Path) -> dict[str, str]:
    """An environment in which torchrun writes its arguments into a file, with a mark behind each call."""
    folder.mkdir()
    (folder / "torchrun").write_text('#!/bin/sh\nprintf \'%s\\0\' "$0" "$@" >>"$CALLS"\nprintf \'\\1\\0\' >>"$CALLS"\n')
    (folder / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    for path in folder.iterdir():
        path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(folder / "calls"), "LC_ALL": "C.UTF-8"}


def calls_of(script: str, environment: dict[str, str], folder: Path) -> list[list[str]]:
    """What bash hands to every training of the script, the program's name first."""
    calls, file = Path(environment["CALLS"]), folder / "script.sh"
    calls.write_bytes(b"")
    file.write_text(script, encoding="utf-8")
    subprocess.run([BASH, "--norc", file], env=environment, cwd=folder, capture_output=True, check=False, timeout=20)
    found: list[list[str]] = [[]]
    for word in calls.read_bytes().split(b"\0")[:-1]:
        if word == b"\1":
            found.append([])
        else:
            found[-1].append(os.fsdecode(word))
    return [[Path(words[0]).name, *words[1:]] for words in found if words]
