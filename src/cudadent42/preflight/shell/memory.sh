kib=$(sed -n 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo 2>/dev/null)
v_available=$(awk "BEGIN { printf \"%.1f\", ${kib:-0} / 1048576 }")
detail="$v_available GiB available"
if awk "BEGIN { exit !(${kib:-0} * 1024 < $MIN_MEMORY) }"; then
    problem=little
elif awk "BEGIN { exit !(${kib:-0} * 1024 < $GOOD_MEMORY) }"; then
    problem=low
fi
