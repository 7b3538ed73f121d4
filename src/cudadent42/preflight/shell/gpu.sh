if ! wants_gpu; then
    skip 'not needed on a CPU'
elif [ -z "$gpu_works" ]; then
    skip 'needs the driver'
else
    v_count=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | wc -l)
    v_index=$gpu_index
    line=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null | sed -n "$((gpu_index + 1))p")
    if [ -z "$line" ]; then
        detail="$v_count visible"
        problem=no-such-index
    else
        v_name=${line%,*}
        v_capability=${line##*, }
        gpu_name=$v_name
        detail="$v_name, compute capability $v_capability"
        case $v_capability in
            7.5) problem=fp16-only ;;
            [1-6].* | 7.[0-4]) problem=too-old ;;
        esac
    fi
fi
