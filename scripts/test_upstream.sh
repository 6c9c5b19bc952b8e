#!/usr/bin/env bash
# Train with a megatron-core that is not the installed one, balanced and as it is by itself, and say whether the bits are equal.
# Usage: scripts/test_upstream.sh CHECKOUT [pytest options]
#
# CHECKOUT is a checkout of Megatron-LM or an unpacked wheel: the folder that holds megatron/core. It is put before what is installed, so
# it shadows the installed megatron-core, and nothing is installed or changed. First a run without any flag of bpipe. Then four runs, on the
# CPU: 1F1B and interleaved 1F1B, each in a loop of its own around megatron.core and by megatron.training's trainer. Ends with one verdict,
# and with 0, 1 (some run differs, ends with an error or is refused) or 2 (CHECKOUT cannot be used).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
refuse() {
    say "$@"
    exit 2
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    usage
    exit 0
fi
if (($# == 0)); then
    usage >&2
    exit 2
fi
[[ -f "$1/megatron/core/__init__.py" ]] || refuse "$1 holds no megatron/core: give the folder of a checkout of Megatron-LM, or of an unpacked wheel"
CHECKOUT="$(cd "$1" && pwd -P)"
shift
# A package of that name is taken whole, and our megatron/scheduling would not be found beside it.
[[ ! -e "$CHECKOUT/megatron/__init__.py" ]] || refuse "$CHECKOUT/megatron has an __init__.py and so is no namespace: too old for bpipe"

set_up dev "then five short trainings with $CHECKOUT, four of them balanced and not (about 4 minutes on 2 cores)"
cd "$ROOT"
# Ours first: it holds megatron/scheduling alone, and hides nothing of the checkout.
export PYTHONPATH="$ROOT:$CHECKOUT" NO_VCS_VERSION=1 CUDA_VISIBLE_DEVICES=""
# Each rank imports for itself: another Megatron may want another order.
export COLD_RANKS=1
VERSION="$("$PYTHON" -c 'import megatron.core as core; print(core.__version__, "from", core.__path__[0])' 2>/dev/null | tail -n 1)" ||
    refuse "$CHECKOUT cannot be imported: PYTHONPATH=$PYTHONPATH $PYTHON -c 'import megatron.core' says why"
say "megatron-core $VERSION"

LOG="$ROOT/runs/upstream/$(basename "$CHECKOUT").log"
# What a refusal or a failure ends with, in whichever rank's log pytest repeats.
CAUSES='bpipe: error: |^E +([A-Za-z_.]+\.)?(Unfit|[A-Za-z]+Error): |^E +\[rank0\]: [A-Za-z_.]+: '
# tests TESTS [pytest options]: run those tests of launches whose names match.
tests() {
    local which=$1 status=0
    shift
    run_logged "$LOG" '::test_' "$PYTHON" -m pytest -v --tb=short --timeout 600 -p no:cacheprovider -k "$which" "$@" \
        tests/gloo/test_launch.py || status=$?
    if ((status > 128)); then exit "$status"; fi
    return "$status"
}
if ! tests "without_our_flags" "$@"; then
    say "verdict: with megatron-core $VERSION a launched script does not train, even without any flag of bpipe. Everything that was said: $LOG"
    exit 1
fi
if ! tests "loop_of_ones_own or (unmodified_script and gpt)" "$@"; then
    say "verdict: with megatron-core $VERSION it does not work as with the one that was tried. Everything that was said: $LOG"
    exit 1
fi
say "verdict: with megatron-core $VERSION balanced training equals its own, bit by bit"
