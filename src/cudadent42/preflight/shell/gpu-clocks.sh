if ! wants_gpu; then
    skip 'not needed on a CPU'
elif [ -z "$gpu_works" ]; then
    skip 'needs the driver'
else
    detail="SM $(nvidia-smi -i "$gpu_index" --query-gpu=clocks.sm,clocks.max.sm --format=csv,noheader 2>/dev/null)"
    v_reasons=
    for reason in hw_slowdown hw_thermal_slowdown hw_power_brake_slowdown sw_thermal_slowdown sw_power_cap; do
        state=$(nvidia-smi -i "$gpu_index" --query-gpu="clocks_event_reasons.$reason" --format=csv,noheader 2>/dev/null)
        if [ "$state" = Active ]; then
            v_reasons="$v_reasons${v_reasons:+, }$(echo "$reason" | tr '_' ' ')"
        fi
    done
    if [ -n "$v_reasons" ]; then
        problem=throttled
    fi
fi
