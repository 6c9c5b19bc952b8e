#!/usr/bin/env bash
# Train with a megatron-core that is not the installed one, balanced and stock, and say whether the results are bit-identical.
# Usage: scripts/test_upstream.sh CHECKOUT [REF...] [pytest options]
#
# CHECKOUT is a checkout of Megatron-LM or an unpacked wheel: the folder that has megatron/core. With REFs, each a tag, branch or commit,
# CHECKOUT is any git directory of Megatron-LM, and each REF is unpacked into runs/upstream. That Megatron precedes the installed packages
# on the path, so it shadows the installed megatron-core, and nothing is installed or changed. The first run has no flag of bpipe. Then
# comes Megatron-LM's own pretrain_gpt.py, if it is there: by itself, in two Vs, in both directions and interleaved in groups. Then one
# schedule of each kind on the CPU: by Megatron's loops, by ours, with split backwards, in a V, in both directions, with vocabulary shards,
# in slices. ONLY=REGEX tries only the kinds whose names match. Prints a line for each Megatron and kind, with the reason of a failure, and
# a verdict for each Megatron. The exit status is 0, 1 (a kind differs, fails or is refused) or 2 (CHECKOUT cannot be used).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

refuse() {
    say "$@"
    exit 2
}

help_if_asked "$@"
usage_unless_given "$@"
CHECKOUT=$1 REFS=()
shift
while (($#)) && [[ "$1" != -* ]]; do
    REFS+=("$1")
    shift
done
OPTIONS=("$@")

# check FOLDER WHAT: refuse a folder, called WHAT, whose Megatron cannot be put before the installed one.
check() {
    [[ -f "$1/megatron/core/__init__.py" ]] ||
        refuse "$2 holds no megatron/core: give the folder of a checkout of Megatron-LM, or of an unpacked wheel"
    # A package of that name is imported whole, and our megatron/scheduling would not be found.
    [[ ! -e "$1/megatron/__init__.py" ]] || refuse "$2/megatron has an __init__.py and so is no namespace: too old for bpipe"
}
if ((${#REFS[@]})); then
    for ref in "${REFS[@]}"; do
        git -C "$CHECKOUT" rev-parse --quiet --verify "$ref^{commit}" >/dev/null 2>&1 ||
            refuse "$CHECKOUT has no commit $ref: fetch it there, or give another (git -C $CHECKOUT branch -a)"
    done
else
    check "$CHECKOUT" "$CHECKOUT"
fi
CHECKOUT="$(cd "$CHECKOUT" && pwd -P)"

set_up dev "then short trainings with $CHECKOUT, balanced and not (about 10 minutes each on 2 cores)"
cd "$ROOT"
export NO_VCS_VERSION=1 CUDA_VISIBLE_DEVICES=""
# Each rank imports for itself, because another Megatron may need another order.
export COLD_RANKS=1
# The last lines of a refusal or a failure, in whichever rank's log pytest repeats.
CAUSES='bpipe: error: |^E +([A-Za-z_.]+\.)?(Unfit|[A-Za-z]+Error): |^E +\[rank[0-9]+\]: [A-Za-z_.]+: '
# A kind, its test file, and the tests in it.
OWN_SCRIPT=(
    "upstreams_script_stock|test_upstream_script.py|[stock]"
    "upstreams_script_v_half|test_upstream_script.py|[v-half]"
    "upstreams_script_zb_v_of_torch|test_upstream_script.py|[zb-v_of_torch]"
    "upstreams_script_bitpipe|test_upstream_script.py|[bitpipe]"
    "upstreams_script_grouped|test_upstream_script.py|[grouped]"
)
KINDS=(
    "megatrons_loops|test_launch.py|loop_of_ones_own or (unmodified_script and gpt)"
    "our_loop|test_schedules.py|[m8-own]"
    "split_backwards|test_schedules.py|m8-zb_h1]"
    "a_v|test_checkpoints.py|continues_the_others_checkpoint and tied"
    "both_directions|test_placed.py|two_pipes_train_as_stock_does and three_chunks"
    "vocabulary_shards|test_vocabulary.py|train_what_the_whole_layer_does and m8-one"
    "slices|test_slices.py|train_what_stock_megatron_trains and uneven"
)
# tests KIND FILE TESTS: run the tests of a file whose names match.
tests() {
    local kind=$1 file=$2 which=$3 status=0
    run_logged "$LOGS/$kind.log" '::test_' "$PYTHON" -m pytest --slow -v --tb=short --timeout 600 -p no:cacheprovider -k "$which" \
        "${OPTIONS[@]}" "tests/gloo/$file" || status=$?
    if ((status > 128)); then exit "$status"; fi
    return "$status"
}
# judge KIND FILE TESTS: run them, and set `result` to the outcome.
judge() {
    local cause
    if tests "$@"; then
        result="equal"
        return
    fi
    # A line that ends with a colon goes on in the next.
    cause="$(grep -m 1 -A 1 -E "$CAUSES" "$LOGS/$1.log" | sed -E 's/^E +//' |
        awk 'NR == 1 { printf "%s", $0; if (!/:$/) exit } NR == 2 { printf " %s", $0 }' || true)"
    case "$cause" in
        AssertionError*) result="differs: $cause" ;;
        *) result="fails: ${cause:-see $LOGS/$1.log}" ;;
    esac
    return 1
}
# try FOLDER NAME: try all kinds with one Megatron, and add their lines and a verdict to `table`.
table=() status=0
try() {
    local folder=$1 name=$2 kind which file version result tried=0 failed=0 kinds=("${KINDS[@]}")
    LOGS="$ROOT/runs/upstream/$name"
    mkdir -p "$LOGS"
    # Ours first: it has only megatron/scheduling, and hides nothing of the checkout.
    export PYTHONPATH="$ROOT:$folder" UPSTREAM_SCRIPT="$folder/pretrain_gpt.py"
    version="$("$PYTHON" -c 'import megatron.core as core; print(core.__version__, "from", core.__path__[0])' 2>/dev/null | tail -n 1)" ||
        refuse "$folder cannot be imported: PYTHONPATH=$PYTHONPATH $PYTHON -c 'import megatron.core' says why"
    say "megatron-core $version"
    if [[ -f "$UPSTREAM_SCRIPT" ]]; then kinds=("${OWN_SCRIPT[@]}" "${KINDS[@]}"); fi
    if ! judge without_bpipe test_launch.py "without_our_flags"; then
        table+=("$name: without_bpipe: $result")
        table+=("verdict: with megatron-core $version a launched script does not train, even without any flag of bpipe. Logs: $LOGS")
        status=1
        return
    fi
    for kind in "${kinds[@]}"; do
        IFS='|' read -r kind file which <<<"$kind"
        if [[ ! "$kind" =~ ${ONLY:-.} ]]; then continue; fi
        tried=$((tried + 1))
        judge "$kind" "$file" "$which" || failed=$((failed + 1))
        table+=("$name: $kind: $result")
    done
    ((tried)) || refuse "ONLY=${ONLY:-} is the name of no kind; they are ${kinds[*]%%|*}"
    if ((failed)); then
        table+=("verdict: with megatron-core $version $failed of $tried kinds do not train as with the supported version. Logs: $LOGS")
        status=1
    else
        table+=("verdict: with megatron-core $version training of $tried kinds is bit-identical to its own; shards and slices are equal to rounding")
    fi
}
# unpacked REF: unpack it, and print where.
unpacked() {
    local folder="$ROOT/runs/upstream/${1//\//_}/unpacked" data="megatron/core/datasets" installed
    rm -rf "$folder"
    mkdir -p "$folder"
    git -C "$CHECKOUT" archive "$1" | tar -x -C "$folder"
    # Megatron compiles its helpers if it finds a Makefile, which needs pybind11; the wheel has the same ones compiled.
    installed="$("$PYTHON" -I -c "import importlib.util as u; print(u.find_spec('megatron.core').submodule_search_locations[0])")/datasets"
    if cmp -s "$installed/helpers.cpp" "$folder/$data/helpers.cpp"; then
        cp "$installed"/helpers_cpp*.so "$folder/$data"
        rm -f "$folder/$data/Makefile"
    fi
    echo "$folder"
}
for ref in "${REFS[@]}"; do
    folder="$(unpacked "$ref")"
    check "$folder" "$ref"
    say "$ref is $(git -C "$CHECKOUT" log -1 --format='%h of %cs' "$ref")"
    try "$folder" "${ref//\//_}"
done
if ((${#REFS[@]} == 0)); then try "$CHECKOUT" "$(basename "$CHECKOUT")"; fi
for line in "${table[@]}"; do say "$line"; done
exit "$status"
