#!/usr/bin/env bash
# Set up if needed, then make the figures of the documentation anew, from predictions and from runs. Usage:
#
#   scripts/validation/make_figures.sh [RUNS]     RUNS: the folder of a quickstart's two runs (default: runs/quickstart, where it is there)
#
# Without such runs everything else is made, and it says which figure is not.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi

RUNS="${1:-}"
if [[ -n "$RUNS" ]]; then
    RUNS="$(realpath -m "$RUNS")"
elif [[ -f "$ROOT/runs/quickstart/summary.json" ]]; then
    RUNS="$ROOT/runs/quickstart"
fi

set_up dev "then drawing into docs/figures"
cd "$ROOT"
"$PYTHON" scripts/validation/make_figures.py ${RUNS:+--runs "$RUNS"}
