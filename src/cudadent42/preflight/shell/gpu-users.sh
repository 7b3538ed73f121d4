if ! wants_gpu; then
    skip 'not needed on a CPU'
elif [ -z "$gpu_works" ]; then
    skip 'needs the driver'
else
    v_pids=$(nvidia-smi -i "$gpu_index" --query-compute-apps=pid --format=csv,noheader 2>/dev/null | tr '\n' ',')
    v_pids=${v_pids%,}
    detail='no other process'
    if [ -n "$v_pids" ]; then
        v_count=$(echo "$v_pids" | tr ',' '\n' | wc -l)
        detail="processes $v_pids"
        problem=shared
    fi
fi
