#!/bin/sh
# compute-sanitizer over every CUDA kernel on small shapes: memcheck and racecheck, all programs at once.
# Usage: tools/sanitize.sh [KERNEL...]     (of attention: hopper, portable, ...; if none is named all that the GPU takes,
# gradients, attention over sequences of any lengths, mixtures of experts and routing included)
# Exits with 0 if nothing was found, 1 if something was, 2 if it, or one of its programs, cannot run. Set CUDADENT42_PYTHON for a Python with
# torch for CUDA, COMPUTE_SANITIZER for the tool if it is not on the PATH or in the toolkit.
set -u
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=${CUDADENT42_PYTHON:-$root/.venv/bin/python}
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")}
for tool in "$python" "$sanitizer"; do
    if ! command -v "$tool" > /dev/null; then
        echo "sanitize: $tool was not found; set CUDADENT42_PYTHON and COMPUTE_SANITIZER" >&2
        exit 2
    fi
done
PYTHONPATH=$root/src:$root/tests${PYTHONPATH:+:$PYTHONPATH}
# Memory of the caching allocator is one large block to the sanitizer; without it, each tensor has bounds.
PYTORCH_NO_CUDA_MEMORY_CACHING=1
# The references are computed on the CPU, by as many programs at once as there are.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export PYTHONPATH PYTORCH_NO_CUDA_MEMORY_CACHING OMP_NUM_THREADS
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# The programs of calls, each with what the names of its kernels begin with.
programs() {
    echo "sanitized_cuda_calls.py attention_"
    [ "$kernels" = all ] || return
    echo "sanitized_backward_calls.py attention_"
    echo "sanitized_varlen_calls.py attention_"
    echo "sanitized_append_calls.py paged_append"
    echo "sanitized_model_calls.py rotate"
    echo "sanitized_model_calls.py key_lists"
    echo "sanitized_moe_calls.py moe_"
    echo "sanitized_moe_calls.py topk_"
    echo "sanitized_moe_calls.py routing_losses"
    echo "sanitized_moe_backward_calls.py moe_"
}
kernels=all
[ $# -eq 0 ] || kernels=some

# Compiled and checked once without the sanitizer, which would slow the compiler down.
programs | cut -d' ' -f1 | sort -u > "$logs/compiled"
while read -r calls; do
    (
        "$python" "$root/tests/flashmoe_science/$calls" "$@" > "$logs/$calls.log" 2>&1
        echo $? > "$logs/$calls.status"
    ) &
done < "$logs/compiled"
wait
result=0
: > "$logs/programs"
while read -r calls; do
    cat "$logs/$calls.log"
    if [ "$(cat "$logs/$calls.status")" = 0 ]; then
        programs | grep "^$calls " >> "$logs/programs"
    else
        echo "sanitize: $calls failed without the sanitizer; the others go on" >&2
        result=2
    fi
done < "$logs/compiled"

# Only our kernels: torch's own are not ours to mend, and racecheck takes its time over them. The driver calls that torch
# tries and survives are no errors. A launch that hangs must not hang this.
# check TOOL CALLS NAMES [KERNEL...]
check() {
    tool=$1 calls=$2 names=$3
    shift 3
    log=$logs/$calls-$names-$tool
    if SANITIZER=$tool timeout "${SANITIZE_TIMEOUT_S:-300}" "$sanitizer" --tool "$tool" --kernel-name "kns=$names" --report-api-errors no \
        --error-exitcode 1 "$python" "$root/tests/flashmoe_science/$calls" "$@" > "$log" 2>&1 && grep -q '^passed' "$log"; then
        echo passed > "$log.result"
    else
        echo FAILED > "$log.result"
    fi
}
while read -r calls names; do
    for tool in memcheck racecheck; do
        check "$tool" "$calls" "$names" "$@" &
    done
done < "$logs/programs"
wait
while read -r calls names; do
    for tool in memcheck racecheck; do
        log=$logs/$calls-$names-$tool
        echo "$calls, kernels $names*, $tool: $(cat "$log.result")"
        if [ "$(cat "$log.result")" != passed ]; then
            tail -n 60 "$log"
            result=1
        fi
    done
done < "$logs/programs"
exit "$result"
