#!/usr/bin/env bash
# Run the tests that depend on torch's version with one version, on the CPU, and print a row of the table in docs/pipelining.md.
# Usage: scripts/test_torch.sh VERSION [pytest options]
#
# VERSION is a version on PyPI, such as 2.11.0, or `newest`. It is installed with the extra `dev` into runs/torch/VERSION, or into the
# folder that VENV names, and reused from there (5.5 GB each). Four parts: the runtime's tests; those of bpipe.torch, with real processes;
# one training with Megatron, balanced and stock; the example with torch's pipelining. Prints a line for each part with its numbers of
# tests, and a row of the table. The exit status is 0, 1 (a part failed, or torch is not installed) or 2 (VERSION is not a version).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

help_if_asked "$@"
usage_unless_given "$@"
WANTED=$1
shift
if [[ ! "$WANTED" =~ ^(newest|[0-9]+(\.[0-9]+){1,2}[A-Za-z0-9.+-]*)$ ]]; then
    say "'$WANTED' is not a version of torch. Give one such as 2.11.0, or newest."
    exit 2
fi

FOLDER="$ROOT/runs/torch/$WANTED"
LOGS="$FOLDER-logs"
mkdir -p "$LOGS"
export VENV="${VENV:-$FOLDER}"
if [[ "$WANTED" != newest ]]; then
    # pip also keeps the project's own bound, and other constraints that are set here.
    echo "torch==$WANTED" >"$LOGS/constraint.txt"
    export PIP_CONSTRAINT="${PIP_CONSTRAINT:+$PIP_CONSTRAINT }$LOGS/constraint.txt"
fi
set_up dev "then the tests with torch $WANTED (about 8 minutes on 2 cores)"
cd "$ROOT"
export PYTHONPATH="$ROOT" CUDA_VISIBLE_DEVICES=""
VERSION="$("$PYTHON" -c 'import torch; print(torch.__version__)')"
if [[ "$WANTED" != newest && "${VERSION%%+*}" != "$WANTED" ]]; then
    die "$VENV has torch $VERSION, not $WANTED. Remove that folder, or name another one: VENV=<folder> $0 $WANTED"
fi
say "torch $VERSION"

# part NAME COMMAND...: run one part, whose output ends with pytest's numbers or with a line of its own.
LINES=() ROW="" FAILED=0
part() {
    local name=$1 status=0 result
    shift
    run_logged "$LOGS/$name.log" '^(FAILED|ERROR) |(passed|failed).* in [0-9]' "$@" || status=$?
    if ((status > 128)); then exit "$status"; fi
    if ((status > 0)); then FAILED=$((FAILED + 1)); fi
    # pytest's last line has the numbers; a library may print more after it.
    result="$(grep -oE '^(=+ )?[0-9]+ (passed|failed|skipped|errors?|deselected)[^=]* in ' "$LOGS/$name.log" | tail -n 1 |
        sed -E 's/^=+ //; s/,? in $//; s/, [0-9]+ (deselected|warnings?)//g' || true)"
    if ((status > 0)); then result="FAILED${result:+: $result}"; fi
    LINES+=("$name: ${result:-passed}")
    ROW+=" ${result:-passed} |"
}
pytests() {
    local name=$1
    shift
    part "$name" "$PYTHON" -m pytest -q -n 2 --dist loadfile --tb=short --timeout 600 -p no:cacheprovider "$@"
}
PIPELINED=(tests/gloo/test_pipelined.py tests/gloo/test_pipelined_features.py tests/gloo/test_pipelined_budget.py)
pytests runtime "$@" tests/unit/runtime
pytests bpipe.torch "$@" tests/unit/torch "${PIPELINED[@]}"
pytests megatron -k test_eight_stages_hold_five_each "$@" tests/gloo/test_training.py
part example "$PYTHON" examples/pipelining.py

for line in "${LINES[@]}"; do say "$line"; done
echo "| ${VERSION%%+*} | $(date -u +%Y-%m-%d) |$ROW"
if ((FAILED)); then
    say "with torch $VERSION $FAILED of ${#LINES[@]} parts failed. Logs: $LOGS"
    exit 1
fi
