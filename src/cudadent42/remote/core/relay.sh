# Workers for a coordinator at the other end of this connection, for as long as it lasts.
#
#   relay.sh FOLDER JOB PYTHON DEVICE [ARGUMENT...]    `cudadent42 fleet relay ARGUMENT...` on standard input and output
#
# processes.sh stands before it. FOLDER/jobs/JOB is on record meanwhile, so a run that is sent here waits for its end, and
# `remote stop JOB` ends it. It is removed in the end.
folder=$1 mine=$2 python=$3 device=$4
case $folder in /*) ;; *) folder=$HOME/$folder ;; esac
shift 4
umask 077
mkdir -p -- "$folder/jobs" || return 71
exec 9>"$folder/.lock" && flock -w 30 9 || return 76
end_job "$folder" "$mine" # whose connection was cut
if running_job "$folder"; then
    echo "$job" >&2
    return 75
fi
[ -d "$folder/tree" ] || return 72
if [ -n "$python" ] && ! command -v "$python" >/dev/null; then
    echo "$python" >&2
    return 77
fi
for left in "$folder"/jobs/fleet-*; do # of coordinators that are gone
    [ ! -d "$left" ] || rm -rf -- "$left"
done
mkdir -- "$folder/jobs/$mine" && hold "$folder/jobs/$mine/pid" || return 71
exec 9>&-
log=$folder/jobs/$mine/log code=0
if [ -n "$python" ]; then
    PYTHONPATH=$folder/tree/src${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
else
    # What it prints is no message.
    "$folder/tree/tools/bootstrap.sh" --device "$device" --no-preflight </dev/null >"$log" 2>&1 || code=$?
    python=$folder/tree/.venv/bin/python
fi
if [ "$code" -eq 0 ]; then
    (cd -- "$folder/tree" && exec "$python" -m cudadent42 fleet relay "$folder/jobs/$mine" --device "$device" "$@") \
        2>>"$log" || code=$?
fi
[ "$code" -eq 0 ] || tail -c 1000 -- "$log" >&2
cd -- "$folder" && rm -rf -- "jobs/$mine"
return "$code"
