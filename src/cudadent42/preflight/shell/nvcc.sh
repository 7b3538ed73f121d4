nvcc=$(command -v nvcc 2>/dev/null || :)
if [ -n "$nvcc" ]; then
    detail="$(nvcc_release "$nvcc") at $nvcc"
else
    for home in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda /usr/local/cuda-*; do
        if [ -n "$home" ] && [ -x "$home/bin/nvcc" ]; then
            nvcc=$home/bin/nvcc
            v_folder=$home/bin
            break
        fi
    done
    if [ -z "$nvcc" ]; then
        skip 'none, and nothing here needs it'
    elif wants_gpu; then
        detail="$(nvcc_release "$nvcc") at $nvcc"
        problem=off-path
    else
        skip "at $nvcc, not on PATH; a CPU run does not need it"
    fi
fi
