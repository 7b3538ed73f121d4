# What happens on the far side of a remote run. Sent with every call, so it is never older than who calls it.
#
#   job.sh start   FOLDER JOB PYTHON DEVICE [ARGUMENT...]   start `cudadent42 run ARGUMENT...`, unless JOB is there
#   job.sh state   FOLDER JOB       prints: none | running | lost | done CODE
#   job.sh follow  FOLDER JOB FROM  prints the log from byte FROM on, until the job has ended
#   job.sh stop    FOLDER JOB       ends it and all that it started
#   job.sh fetch   FOLDER JOB       the job's folder as a tar archive
#   job.sh copy    FOLDER JOB       the same of one that goes on, as it is at that moment
#   job.sh forget  FOLDER JOB       removes it
#   job.sh tree    FOLDER           prints the digest of the working tree that is there
#   job.sh receive FOLDER DIGEST    makes the working tree what the tar archive on standard input holds
#   job.sh list    FOLDER           every job and its state
#   job.sh gpus    FOLDER           compute capability of each GPU
#
# processes.sh stands before it. FOLDER/tree is the working tree with its environment, FOLDER/jobs/JOB a job: log, out, pid, exit, run.
command=$1
folder=$2
case $folder in /*) ;; *) folder=$HOME/$folder ;; esac
shift 2
umask 077
# Before anything is sent: found later, what is missing looks like another failure.
for tool in tar setsid flock tail sed cut; do
    if ! command -v "$tool" >/dev/null; then
        echo "$tool" >&2
        return 70
    fi
done
mkdir -p -- "$folder/jobs" || return 71

# state_of JOB: a job is lost where its process is gone and left no exit code, as after a reboot.
state_of() {
    if [ -f "$folder/jobs/$1/exit" ]; then
        echo "done $(cat "$folder/jobs/$1/exit")"
    elif [ ! -d "$folder/jobs/$1" ]; then
        echo none
    elif lives "$folder/jobs/$1/pid"; then
        echo running
    else
        echo lost
    fi
}

# One call at a time changes what is there: of two, one may belong to a connection that was lost.
lock() {
    exec 9>"$folder/.lock" && flock -w 30 9
}

case $command in
    start)
        job=$1 python=$2 device=$3
        shift 3
        lock || return 76
        if [ -f "$folder/jobs/$job/pid" ]; then
            return 0 # a start whose answer was lost
        fi
        if running_job "$folder"; then
            echo "$job"
            return 75
        fi
        [ -d "$folder/tree" ] || return 72
        if [ -n "$python" ] && ! command -v "$python" >/dev/null; then
            echo "$python" >&2
            return 77
        fi
        mkdir -p -- "$folder/jobs/$job" && cd -- "$folder/jobs/$job" || return 71
        # Its parent waits for it: as a zombie, which a container's first process may leave for ever, it would seem to live.
        (setsid sh -c '
            job=$1 tree=$2 python=$3 device=$4
            shift 4
            # A stop is for the run, which keeps what it has; this waits for its exit code.
            trap : TERM
            # Where that cannot be written, as on a full disk, nobody could follow, limit or end it.
            echo $$ "$(sed "s/.*) //" /proc/$$/stat | cut -d " " -f 20)" >pid.new && mv pid.new pid || exit
            code=0
            if [ -n "$python" ]; then
                PYTHONPATH=$tree/src${PYTHONPATH:+:$PYTHONPATH}
                export PYTHONPATH
            else
                # What bootstrap prints is for the log: standard output is the run'"'"'s own.
                # The run begins with preflight itself.
                "$tree/tools/bootstrap.sh" --device "$device" --no-preflight >&2 || code=$?
                python=$tree/.venv/bin/python
            fi
            if [ "$code" -eq 0 ]; then
                # Paths among the arguments are the working tree'"'"'s.
                (cd -- "$tree" && exec "$python" -m cudadent42 run --output-dir "../jobs/$job/run" "$@") || code=$?
            fi
            echo "$code" >exit.new && mv exit.new exit
        ' sh "$job" "$folder/tree" "$python" "$device" "$@" & wait) </dev/null >out 2>log 9>&- &
        # Known as started only once its process is on record.
        tries=0
        until [ -f pid ] || ! kill -0 "$!" 2>/dev/null || [ "$tries" -ge 500 ]; do
            sleep 0.02
            tries=$((tries + 1))
        done
        if [ ! -f pid ]; then
            cat log >&2
            cd -- "$folder" && rm -rf -- "jobs/$job" # whatever still begins there finds no place for its pid
            return 73
        fi
        ;;
    state) state_of "$1" ;;
    follow)
        log=$folder/jobs/$1/log
        [ -f "$log" ] || return 72
        if lives "$folder/jobs/$1/pid"; then
            tail -c "+$(($2 + 1))" -f --pid="$pid" -s 0.2 -- "$log"
        else
            tail -c "+$(($2 + 1))" -- "$log"
        fi
        ;;
    stop) end_job "$folder" "$1" ;;
    fetch)
        # On record, so that the machine is not powered off under it.
        hold "$folder/fetching"
        tar -C "$folder/jobs" -cf - -- "$1"
        ;;
    copy)
        # tar's 1: a file grew while it was read.
        tar -C "$folder/jobs" -cf - -- "$1" || [ $? -eq 1 ]
        ;;
    forget)
        case $(state_of "$1") in running) return 75 ;; esac
        rm -rf -- "${folder:?}/jobs/$1"
        ;;
    tree) cat -- "$folder/tree/.digest" 2>/dev/null || : ;;
    receive)
        if running_job "$folder"; then
            echo "$job"
            return 75
        fi
        # What came of calls that ended half-way: first of all, since it may be what fills the disk. Another may be at it,
        # whose connection was lost, while this one tries again.
        for new in "$folder"/tree.new.*; do
            [ -d "/proc/${new##*.}" ] || rm -rf -- "$new"
        done
        new=$folder/tree.new.$$
        rm -rf -- "$new" && mkdir -- "$new" || return 71
        # The digest is the archive's last file: tar itself takes one that was cut between two files for a whole one.
        if ! LC_ALL=C tar -C "$new" -xf - || [ "$(cat -- "$new/.digest" 2>/dev/null)" != "$1" ]; then
            rm -rf -- "$new"
            return 74
        fi
        lock || return 76
        if running_job "$folder"; then
            echo "$job"
            return 75
        fi
        # The environment stays: it knows by itself whether it is still right.
        if [ -d "$folder/tree/.venv" ]; then
            mv -- "$folder/tree/.venv" "$new/.venv" || return 74
        fi
        rm -rf -- "$folder/tree.old" &&
            { [ ! -d "$folder/tree" ] || mv -- "$folder/tree" "$folder/tree.old"; } &&
            mv -- "$new" "$folder/tree" && rm -rf -- "$folder/tree.old" || return 74
        ;;
    list)
        for entry in "$folder"/jobs/*; do
            [ -d "$entry" ] && echo "${entry##*/} $(state_of "${entry##*/}")"
        done
        return 0
        ;;
    # One that has fallen off the bus hangs whoever asks for it.
    gpus) timeout 60 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || : ;;
    *) return 64 ;;
esac
