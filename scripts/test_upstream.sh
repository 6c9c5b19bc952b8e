#!/usr/bin/env bash
# Train with a megatron-core that is not the installed one, balanced and as it is by itself, and say whether the bits are equal.
# Usage: scripts/test_upstream.sh CHECKOUT [pytest options]
#
# CHECKOUT is a checkout of Megatron-LM or an unpacked wheel: the folder that holds megatron/core. It is put before what is installed, so
# it shadows the installed megatron-core, and nothing is installed or changed. First a run without any flag of bpipe. Then one schedule of
# each kind on the CPU: by Megatron's loops, by ours, with split backwards, in a V, in both directions, with vocabulary shards, in slices.
# Ends with a line for each kind, and why it fails, with one verdict, and with 0, 1 (some kind differs, ends with an error or is refused)
# or 2 (CHECKOUT cannot be used).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() { sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
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

set_up dev "then short trainings with $CHECKOUT, balanced and not (about 6 minutes on 2 cores)"
cd "$ROOT"
# Ours first: it holds megatron/scheduling alone, and hides nothing of the checkout.
export PYTHONPATH="$ROOT:$CHECKOUT" NO_VCS_VERSION=1 CUDA_VISIBLE_DEVICES=""
# Each rank imports for itself: another Megatron may want another order.
export COLD_RANKS=1
VERSION="$("$PYTHON" -c 'import megatron.core as core; print(core.__version__, "from", core.__path__[0])' 2>/dev/null | tail -n 1)" ||
    refuse "$CHECKOUT cannot be imported: PYTHONPATH=$PYTHONPATH $PYTHON -c 'import megatron.core' says why"
say "megatron-core $VERSION"

LOGS="$ROOT/runs/upstream/$(basename "$CHECKOUT")"
mkdir -p "$LOGS"
# What a refusal or a failure ends with, in whichever rank's log pytest repeats.
CAUSES='bpipe: error: |^E +([A-Za-z_.]+\.)?(Unfit|[A-Za-z]+Error): |^E +\[rank[0-9]+\]: [A-Za-z_.]+: '
# tests KIND FILE TESTS [pytest options]: run those tests of a file whose names match.
tests() {
    local kind=$1 file=$2 which=$3 status=0
    shift 3
    run_logged "$LOGS/$kind.log" '::test_' "$PYTHON" -m pytest -v --tb=short --timeout 600 -p no:cacheprovider -k "$which" "$@" \
        "tests/gloo/$file" || status=$?
    if ((status > 128)); then exit "$status"; fi
    return "$status"
}
# A kind, its tests' file, and which of them.
KINDS=(
    "megatrons_loops|test_launch.py|loop_of_ones_own or (unmodified_script and gpt)"
    "our_loop|test_schedules.py|m8-own"
    "split_backwards|test_halves.py|m8-zb_h1"
    "a_v|test_placed.py|goes_on_from_stocks_checkpoint and tied"
    "both_directions|test_two_pipes_trained.py|two_pipes_train_as_stock_does and bitpipe-3"
    "vocabulary_shards|test_vocabulary.py|vocabulary_m8-one"
    "slices|test_slices.py|train_what_stock_megatron_trains and uneven"
)
if ! tests without_bpipe test_launch.py "without_our_flags" "$@"; then
    say "verdict: with megatron-core $VERSION a launched script does not train, even without any flag of bpipe. Everything that was said: $LOGS"
    exit 1
fi
table=() failed=0
for kind in "${KINDS[@]}"; do
    IFS='|' read -r name file which <<<"$kind"
    if tests "$name" "$file" "$which" "$@"; then
        table+=("$name: equal")
    else
        failed=$((failed + 1))
        # What ends with a colon says in the next line what it is.
        cause="$(grep -m 1 -A 1 -E "$CAUSES" "$LOGS/$name.log" | sed -E 's/^E +//' |
            awk 'NR == 1 { printf "%s", $0; if (!/:$/) exit } NR == 2 { printf " %s", $0 }' || true)"
        table+=("$name: fails: ${cause:-see $LOGS/$name.log}")
    fi
done
for line in "${table[@]}"; do say "$line"; done
if ((failed)); then
    say "verdict: with megatron-core $VERSION $failed of ${#KINDS[@]} kinds do not train as with the one that was tried. Everything that was said: $LOGS"
    exit 1
fi
say "verdict: with megatron-core $VERSION training equals its own, bit by bit; shards and slices to rounding"
