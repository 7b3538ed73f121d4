#!/bin/sh
# compute-sanitizer over every CUDA kernel on small shapes: memcheck, then racecheck.
# Usage: tools/sanitize.sh [KERNEL...]     (of attention: hopper, portable, ...; if none is named all that the GPU takes,
# and those of attention over sequences of any lengths and of mixtures of experts)
# Exits with 0 if nothing was found, 1 if something was, 2 if it cannot run. Set CUDADENT42_PYTHON for a Python with
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
PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
# Memory of the caching allocator is one large block to the sanitizer; without it, each tensor has bounds.
PYTORCH_NO_CUDA_MEMORY_CACHING=1
export PYTHONPATH PYTORCH_NO_CUDA_MEMORY_CACHING
log=$(mktemp)
trap 'rm -f "$log"' EXIT
result=0

# check CALLS KERNELS [NAME...]: the script of calls, and what the names of the kernels that it is about begin with.
check() {
    calls=$root/tests/flashmoe_science/$1
    kernels=$2
    shift 2
    # Compiled and checked once without the sanitizer, which would slow the compiler down.
    "$python" "$calls" "$@" || exit 2
    for tool in memcheck racecheck; do
        # Only our kernels: torch's own are not ours to mend, and racecheck takes its time over them.
        # The driver calls that torch tries and survives are no errors. A launch that hangs must not hang this.
        if timeout 60 "$sanitizer" --tool "$tool" --kernel-name "kns=$kernels" --report-api-errors no --error-exitcode 1 \
            "$python" "$calls" "$@" > "$log" 2>&1 && grep -q '^passed' "$log"; then
            echo "$kernels $tool: passed"
        else
            echo "$kernels $tool: FAILED"
            tail -n 60 "$log"
            result=1
        fi
    done
}

check sanitized_cuda_calls.py attention_ "$@"
if [ $# -eq 0 ]; then
    check sanitized_varlen_calls.py attention_
    check sanitized_moe_calls.py moe_
    check sanitized_moe_calls.py topk_
fi
exit "$result"
