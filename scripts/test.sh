#!/usr/bin/env bash
# Set up if needed, then check and test. Usage: scripts/test.sh [--checks] [--slow] [pytest options, e.g. -k transport]
#
#   --checks  only the gate: formatting, lint, types, docstrings, spelling, size, tests/unit
#   --slow    also the tests marked slow (or RUN_SLOW=1)
#
# The gate comes first and ends the run if it fails. Then come the tests on late devices (skipped without a compiler), those with real
# processes (scripts, and gloo on the CPU), and those in a browser (skipped without one). Several pytests run side by side (pytest-xdist);
# with `-n 0` only one does, as `--pdb` needs.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

CHECKS_ONLY=""
PYTEST_OPTIONS=()
for option in "$@"; do
    help_if_asked "$option"
    case "$option" in
        --checks) CHECKS_ONLY=yes ;;
        *) PYTEST_OPTIONS+=("$option") ;;
    esac
done

set_up dev "then formatting, lint, types, unit tests${CHECKS_ONLY:+ only}"
cd "$ROOT"
if [[ -t 1 ]]; then export FORCE_COLOR=1; fi

# step NAME COMMAND...: run one part of the gate. All parts run, so that one run shows everything that is wrong.
FAILED=()
STATUS=0
NO_TESTS_CHOSEN=5
step() {
    local name=$1
    shift
    printf -- '--- %s\n' "$name"
    STATUS=0
    local begin=$SECONDS
    run_logged "$ROOT/runs/test/${1}.log" "" "$PYTHON" -m "$@" || STATUS=$?
    printf -- '--- %s: %d:%02d min\n' "$name" $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60))
    if ((STATUS > 128)); then exit "$STATUS"; fi
    if ((STATUS > 0)); then FAILED+=("$name"); fi
}

# A process test starts up to eight ranks that wait for each other much of the time: three such tests fill two cores, and more would cause
# time-outs and need more memory. Files stay whole, because a file shares what it starts, and come in the order of tests/gloo/conftest.py,
# the longest first: xdist begins with those that have the most tests. Cases of a GPU are one file, and share nothing.
UNIT_WORKERS=(-n "$(getconf _NPROCESSORS_ONLN)" --dist loadfile)
CASE_WORKERS=(-n "$(getconf _NPROCESSORS_ONLN)" --dist worksteal)
PROCESS_WORKERS=(-n 3 --dist loadfile --no-loadscope-reorder)

# test_step NAME [OPTION...] FOLDER...: run pytest on the folders that have tests, because it calls an empty collection an error.
test_step() {
    local name=$1 folder folders=() options=()
    shift
    while [[ "$1" != *tests/?* && "$1" != terra/tests ]]; do
        options+=("$1")
        shift
    done
    for folder in "$@"; do
        if [[ -n "$(find "$folder" -name 'test_*.py' -print -quit 2>/dev/null)" ]]; then folders+=("$folder"); fi
    done
    if ((${#folders[@]} > 0)); then
        # The longest are shown, so that whoever slows the suite down sees it.
        step "$name" pytest --durations=10 "${options[@]}" "${PYTEST_OPTIONS[@]}" "${folders[@]}"
        # A selection of tests (-k, -m) may be empty in one of the folders.
        if ((STATUS == NO_TESTS_CHOSEN && ${#PYTEST_OPTIONS[@]} > 0)); then unset "FAILED[-1]"; fi
    fi
}

finish() {
    if ((${#FAILED[@]} > 0)); then
        say "failed: $(printf '%s, ' "${FAILED[@]}" | sed 's/, $//')"
        exit 1
    fi
}

step "formatting (ruff format)" ruff format --check .
step "lint (ruff check)" ruff check .
step "types (mypy)" mypy
step "docstrings (pydoclint)" flake8 bpipe megatron terra/terra
step "spelling (codespell)" codespell_lib bpipe docs examples megatron scripts terra tests ./*.md ./*.py
step "workflows (check-jsonschema)" check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
step "size (scripts/size.py)" scripts.size
test_step "unit tests" "${UNIT_WORKERS[@]}" tests/unit
test_step "tests of terra" -c terra/pyproject.toml "${UNIT_WORKERS[@]}" terra/tests
finish
if [[ -z "$CHECKS_ONLY" ]]; then
    # In processes of their own, because a process has only one kind of accelerator.
    test_step "devices that run late" "${UNIT_WORKERS[@]}" tests/late
    test_step "cases of a GPU, on such devices" "${CASE_WORKERS[@]}" tests/gpu
    test_step "tests with real processes" "${PROCESS_WORKERS[@]}" tests/scripts tests/gloo tests/browser
    finish
fi
