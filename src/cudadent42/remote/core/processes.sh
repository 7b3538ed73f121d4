# Which processes live: put before every script that runs on the far side. Shell builtins alone, because the watchdog
# asks while a run is timed.

# lives FILE: the process whose number and start time FILE holds is there (numbers are used again). Sets $pid.
lives() {
    [ -f "$1" ] && read -r pid since <"$1" && [ -n "$since" ] && start_of "$pid" && [ "$started" = "$since" ]
}

# start_of PID: sets $started, in ticks since the machine's start. A process that has ended and waits to be collected has none.
start_of() {
    [ -r "/proc/$1/stat" ] && { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
    # A program's name stands in parentheses and may hold spaces and parentheses; 20th behind it is the start time.
    # shellcheck disable=SC2086 # numbers, to be split
    set -- ${line##*) }
    [ "$#" -ge 20 ] && [ "$1" != Z ] || return 1
    started=${20}
}

# hold FILE: puts this process on record there.
hold() {
    start_of $$
    echo "$$ $started" >"$1.new" && mv -- "$1.new" "$1"
}

# running_job FOLDER: sets $job to the run that goes on below FOLDER, and $pid.
running_job() {
    for entry in "$1"/jobs/*; do
        if [ ! -f "$entry/exit" ] && lives "$entry/pid"; then
            job=${entry##*/}
            return 0
        fi
    done
    return 1
}

# end_job FOLDER JOB: asks it to end, which lets it keep what it has; makes it end after ten seconds.
end_job() {
    lives "$1/jobs/$2/pid" || return 0
    kill -TERM "-$pid" 2>/dev/null
    tries=0
    while lives "$1/jobs/$2/pid" && [ "$tries" -lt 100 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    ! lives "$1/jobs/$2/pid" || kill -KILL "-$pid" 2>/dev/null
}
