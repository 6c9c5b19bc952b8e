#!/usr/bin/env bash
# Make sure of a Python environment in which this checkout is installed with an extra. Run by itself: `pip install -e ".[dev]"`.
#
# Uses the active virtual environment, or VENV=<folder>, or else .venv in this checkout, which it makes with Python 3.12 or newer. Sets $ROOT,
# $PYTHON and a PATH that begins with the environment. The other scripts source this file; run by itself it only does the set-up. Only pip
# uses the network, and nothing is done if a fingerprint of the project files has not changed.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# The CUDA build of torch with its libraries takes about 5.5 GB, and pip needs space to unpack.
NEEDED_GIB=8
PYTHON=""
ENVIRONMENT=""
EXTRA=""
JOB=""

# say TEXT...: one line on stderr; a terminal's is broken between words.
say() {
    local text columns
    text="$(basename "$0"): $*"
    columns="$(stty size <&2 2>/dev/null || true)" columns="${columns#* }"
    if ((${columns:-0} > 20)); then text="$(fold -s -w "$columns" <<<"$text")"; fi
    printf '%s\n' "$text" >&2
}

die() {
    say "$@"
    exit 1
}

# usage: print the head of the script. help_if_asked ARGUMENT... and usage_unless_given ARGUMENT...: the same, and end, if the first argument
# asks for help, or if there is none.
usage() { sed -n '2,${/^#/!q; s/^# \{0,1\}//p}' "$0"; }

help_if_asked() {
    if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
        usage
        exit 0
    fi
}

usage_unless_given() {
    if (($# == 0)); then
        usage >&2
        exit 2
    fi
}

# --- Running things that a signal can end -----------------------------------------------------------------------------------------------

# Without this, a signal to the script alone would wait for the job, or leave it behind.
stop_job() {
    trap '' INT TERM HUP
    if [[ -n "$JOB" ]]; then
        kill -TERM "$JOB" 2>/dev/null || true
        wait "$JOB" 2>/dev/null || true
    fi
    exit "$1"
}
trap 'stop_job 129' HUP
trap 'stop_job 130' INT
trap 'stop_job 143' TERM

# run_logged LOG REGEX COMMAND...: run the command, log everything, show the lines that match, leave no process behind. If it fails, show
# the lines that match $CAUSES, or else the end of the log. With a $LABEL, a line shows its progress: what the
# regex $PROGRESS last matched, written as $STATE, and the time.
CAUSES="" LABEL="" PROGRESS='$^' STATE='\g<0>'
run_logged() {
    local log=$1 show=$2 status=0
    shift 2
    "$PYTHON" "$ROOT/scripts/run_logged.py" --log "$log" --show "$show" --causes "$CAUSES" \
        --label "$LABEL" --progress "$PROGRESS" --as "$STATE" -- "$@" &
    JOB=$!
    wait "$JOB" || status=$?
    JOB=""
    return "$status"
}

# --- Finding a Python -------------------------------------------------------------------------------------------------------------------

# From the checkout, because pyenv's stand-ins read .python-version there.
recent_enough() {
    (cd "$ROOT" && "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 12))') >/dev/null 2>&1
}

find_python() {
    local candidate pyenv_root="${PYENV_ROOT:-$HOME/.pyenv}"
    for candidate in python3.12 "$pyenv_root"/versions/3.12*/bin/python3.12 python3 python3.13 python3.14; do
        if recent_enough "$candidate"; then
            (cd "$ROOT" && "$candidate" -I -c 'import sys; print(sys.executable)')
            return
        fi
    done
    die "no Python 3.12 or newer found. Install it (Debian/Ubuntu: apt install python3.12 python3.12-venv; pyenv: pyenv install" \
        "3.12), or name an environment that has it: VENV=<folder> $0"
}

# --- Choosing the environment -----------------------------------------------------------------------------------------------------------

# Somebody else's environment is used only if it is usable; it is never repaired or made anew.
unusable() {
    local folder=$1 python=$1/bin/python
    if [[ ! -x "$python" || ! -e "$folder/pyvenv.cfg" ]]; then
        echo "is not a virtual environment"
    elif ! recent_enough "$python"; then
        echo "has a Python older than 3.12"
    elif ! "$python" -I -c 'import pip' 2>/dev/null; then
        echo "has no pip"
    elif ! "$python" -I -c 'import os, sysconfig; raise SystemExit(not os.access(sysconfig.get_path("purelib"), os.W_OK))'; then
        echo "cannot be written to"
    fi
}

choose_environment() {
    local folder reason
    for folder in "${VENV:-}" "${VIRTUAL_ENV:-}"; do
        [[ -n "$folder" ]] || continue
        # VENV does not exist yet: the environment is made there instead of in .venv.
        if [[ "$folder" == "${VENV:-}" && -z "$(ls -A "$folder" 2>/dev/null)" && (! -e "$folder" || -d "$folder") ]]; then
            mkdir -p "$folder" || die "VENV=$folder cannot be made. Name a folder that can be written to."
            ENVIRONMENT="$(cd "$folder" && pwd -P)"
            return
        fi
        reason="$(unusable "$folder")"
        if [[ -z "$reason" ]]; then
            ENVIRONMENT="$(cd "$folder" && pwd -P)"
            return
        fi
        [[ "$folder" != "${VENV:-}" ]] || die "VENV=$folder $reason. Name another folder, or leave VENV out."
        [[ "$folder" -ef "$ROOT/.venv" ]] || say "$folder $reason; using $ROOT/.venv instead"
    done
    ENVIRONMENT="$ROOT/.venv"
}

# --- Installing -------------------------------------------------------------------------------------------------------------------------

complete() {
    [[ -x "$PYTHON" ]] && recent_enough "$PYTHON" || return 1
    local stamp="$ENVIRONMENT/.bpipe-installed"
    [[ -f "$stamp" && "$(<"$stamp")" == "$("$PYTHON" -I "$ROOT/scripts/environment.py" --stamp)" ]] || return 1
    "$PYTHON" -I "$ROOT/scripts/environment.py" "$EXTRA" >/dev/null
}

create_environment() {
    local base
    base="$(find_python)" || exit 1
    # --clear removes what an interrupted run left there.
    "$base" -I -m venv --clear "$ENVIRONMENT" || die "$base cannot make an environment in $ENVIRONMENT. Install its venv module" \
        "(Debian/Ubuntu: apt install python3.12-venv), or free space there."
}

check_disk() {
    local free_kib
    free_kib="$(df -Pk "$ENVIRONMENT" | awk 'NR == 2 { print $4 }')"
    if ((free_kib < NEEDED_GIB * 1024 * 1024)); then
        die "$((free_kib / 1024 / 1024)) GiB free at $ENVIRONMENT; torch and its libraries need about $NEEDED_GIB. Free some space, or" \
            "put the environment on another disk: VENV=<folder there> $0"
    fi
}

pip_install() {
    # pip unpacks gigabytes. If it is interrupted they must not stay in a /tmp that nobody clears, and /tmp may be small.
    local log="$ENVIRONMENT/bpipe-install.log" unpacking="$ENVIRONMENT/bpipe-unpacking" status=0
    rm -rf "$unpacking"
    mkdir "$unpacking"
    TMPDIR="$unpacking" LABEL="$(basename "$0"): installing" \
        PROGRESS='(Collecting|Downloading|Installing) [^ ]+( packages)?' run_logged "$log" '$^' \
        "$PYTHON" -m pip install --disable-pip-version-check --progress-bar off -e "${ROOT}[$EXTRA]" -e "$ROOT/terra" || status=$?
    rm -rf "$unpacking"
    if ((status == 0)); then return; fi
    if ((status > 128)); then exit "$status"; fi
    if grep -qiE 'no space left|errno 28' "$log"; then
        die "the disk is full. Free $NEEDED_GIB GiB at $ENVIRONMENT (and where pip keeps its cache), then run this again."
    elif grep -qiE 'connection|resolution|timed out|proxy|could not find a version|no matching distribution|SSL' "$log"; then
        die "pip could not fetch a package. Check the network (PyPI must be reachable; behind a proxy set HTTPS_PROXY, for a mirror" \
            "PIP_INDEX_URL), then run this again; what is there already is kept. Everything pip said: $log"
    fi
    die "pip failed. Everything it said: $log"
}

# Metadata can be complete while files are missing, so import.
imports_work() {
    local also=""
    if [[ "$EXTRA" == dev ]]; then also=", pytest"; fi
    "$PYTHON" -I -c "import torch, numpy, psutil$also, importlib.util as u; assert u.find_spec('megatron.core') and u.find_spec('bpipe') and u.find_spec('terra').origin" \
        >"$ENVIRONMENT/bpipe-import.log" 2>&1
}

install() {
    local own="" missing
    [[ "$ENVIRONMENT" == "$ROOT/.venv" ]] && own=yes
    if [[ ! -x "$PYTHON" ]] || ! recent_enough "$PYTHON" || ! "$PYTHON" -I -c 'import pip' 2>/dev/null; then
        create_environment
    fi
    # Only torch is big. (The listing exits with 1 if anything is missing, so it cannot be in a pipe here.)
    missing="$("$PYTHON" -I "$ROOT/scripts/environment.py" "$EXTRA" || true)"
    if [[ $'\n'"$missing" == *$'\ntorch'* ]]; then check_disk; fi
    rm -f "$ENVIRONMENT/.bpipe-installed"
    pip_install
    if ! imports_work; then
        [[ -n "$own" ]] || die "the packages in $ENVIRONMENT do not import ($(tail -n 1 "$ENVIRONMENT/bpipe-import.log")). Repair it," \
            "or leave it (deactivate; unset VENV) and this script makes its own."
        say "the packages in $ENVIRONMENT do not import; making it anew"
        create_environment
        check_disk
        pip_install
        imports_work || die "the installed packages do not import: $(tail -n 1 "$ENVIRONMENT/bpipe-import.log")"
    fi
    "$PYTHON" -I "$ROOT/scripts/environment.py" --stamp >"$ENVIRONMENT/.bpipe-installed"
}

# set_up EXTRA NEXT: make sure of an environment with that extra of pyproject.toml. NEXT ("then ...") is what the caller does afterwards.
set_up() {
    EXTRA=$1
    choose_environment
    PYTHON="$ENVIRONMENT/bin/python"
    if complete; then
        say "using $ENVIRONMENT; $2"
    else
        say "installing bpipe into $ENVIRONMENT (5.5 GB, some minutes), $2"
        # Two scripts started together must not install at once. The lock is on a file that always exists, so none is left behind.
        if command -v flock >/dev/null; then
            exec 9<"$ROOT/pyproject.toml"
            flock 9
        fi
        complete || install
        exec 9<&-
    fi
    export VIRTUAL_ENV="$ENVIRONMENT" PATH="$ENVIRONMENT/bin:$PATH" PYTHONUNBUFFERED=1
    unset PYTHONHOME
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    set_up dev "nothing else to do"
fi
