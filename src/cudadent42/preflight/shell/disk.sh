v_folder=$root
kib=$(df -Pk "$root" 2>/dev/null | awk 'NR == 2 { print $4 }')
detail="$(awk "BEGIN { printf \"%.1f\", ${kib:-0} / 1048576 }") GiB free at $root"
if awk "BEGIN { exit !(${kib:-0} * 1024 < $MIN_DISK) }"; then
    problem=full
elif awk "BEGIN { exit !(${kib:-0} * 1024 < $GOOD_DISK) }"; then
    problem=low
fi
if ! can_write "$root"; then
    problem=read-only
fi
