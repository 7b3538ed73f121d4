if ! wants_gpu; then
    skip 'not needed on a CPU'
elif [ -z "$gpu_works" ]; then
    skip 'needs the driver'
elif [ "$status_torch" != ok ] || [ "$torch_cuda" = unknown ]; then
    skip 'needs torch'
else
    v_python=$python
    v_version=$torch_version
    v_cuda=$torch_cuda
    v_driver=$driver_cuda
    detail="torch for CUDA $torch_cuda; whether it sees the GPU is asked by preflight in Python"
    if [ "$torch_cuda" = none ]; then
        detail="torch $torch_version is built without CUDA"
        problem=cpu-build
    elif [ -n "$driver_cuda" ] && [ "${torch_cuda%%.*}" -gt "${driver_cuda%%.*}" ]; then
        # A driver serves every minor version of a major one that it knows.
        detail="torch for CUDA $torch_cuda, driver for CUDA $driver_cuda"
        problem=unseen
    fi
fi
