cores=$(nproc 2>/dev/null || echo 1)
load=$(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null || echo 0)
detail="$cores usable, load $load"
if awk "BEGIN { exit !($load > $MAX_LOAD_SHARE * $cores) }"; then
    problem=busy
fi
