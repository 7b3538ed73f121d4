if ! wants_gpu; then
    skip 'none, and a CPU run needs none'
else
    v_folder=
    for folder in $LIBCUDA_PLACES; do
        if [ -e "$folder/libcuda.so.1" ]; then
            v_folder=$folder
            break
        fi
    done
    if [ "$gpu_hardware" -eq 0 ]; then
        detail='no NVIDIA GPU found'
        problem=no-gpu
    elif ! loader_finds libcuda.so.1; then
        if [ -n "$v_folder" ]; then
            detail="libcuda.so.1 in $v_folder, which the loader does not search"
            problem=off-path
        else
            detail='GPU found, libcuda.so.1 not'
            problem=no-driver
        fi
    elif ! command -v nvidia-smi >/dev/null 2>&1; then
        detail='libcuda.so.1 found; no nvidia-smi to ask it with'
    elif smi=$(within 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1); then
        detail=$(echo "$smi" | head -n 1)
        v_cuda=$(within 20 nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[^:]*Version: *\([0-9]*\.[0-9]*\).*/\1/p' | head -n 1)
        driver_cuda=$v_cuda
        if [ -n "$v_cuda" ]; then
            detail="$detail, serves CUDA $v_cuda"
            if [ "${v_cuda%%.*}" -lt "$MIN_DRIVER_CUDA" ]; then
                problem=old
            fi
        fi
        gpu_works=yes
    elif [ $? -eq 124 ]; then
        detail='nvidia-smi did not return within 20 s'
        problem=hang
    else
        detail=$(echo "$smi" | head -n 1)
        case $smi in
            *'version mismatch'*) problem=mismatch ;;
            *'No devices'*) problem=no-device ;;
            *)
                v_name=nvidia-smi
                v_code=$(echo "$smi" | tr '\n' ' ' | cut -c 1-120)
                problem=init
                ;;
        esac
    fi
fi
