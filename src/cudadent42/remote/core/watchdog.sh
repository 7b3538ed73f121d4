# Powers this machine off when nobody needs it any more, or when its money is spent. It runs here, so it needs neither the
# connection nor the machine from which a run was started. guard.sh puts it, after processes.sh, into a folder of its own:
#
#   limits    three lines: IDLE BUDGET QUIET TICK ARMED (seconds, 0 for no limit; ARMED is another word at each arming);
#             the folder of the terminals; the action: poweroff, end (the run only) or a program
#   folders   the folders in which runs are, a line each
#   state     ARMED BOOT UPTIME SPENT, for when this script is started anew
#   acted     why it acted: REASON ARMED BOOT, then a sentence. After a restart of the machine its limits are void then
#   left      left ARMED BOOT, where the machine was about to be stopped from outside; the same holds for its limits
#   lock pid  of the one that runs
#
# Busy is: a run goes on, or its folder is being fetched. In use is: a log or the working tree changes, a console or a GPU
# works, or somebody is logged in whose terminal was used within QUIET. A run that is busy is never idle, however long it
# says nothing. A terminal that was forgotten counts no more after QUIET, or it would be paid for until somebody looks.
#
# Time is the kernel's, since its start (/proc/uptime): a wall clock that jumps changes nothing. Of files only whether
# their stamps change is asked. BUDGET is time on, so what a machine was off in between is not counted.
cd -- "$(dirname -- "$0")" || exit 1
umask 077
exec 9>lock
flock -n 9 || exit 0
hold pid
read -r boot </proc/sys/kernel/random/boot_id

# Between two records of what is spent: what a crash of the machine may lose.
SAVE_S=60
# A machine that was told to power off, and is still there, is told again after this, and then by force.
FORCE_S=120
# After its run was ended: how long a machine waits for a fetch to begin, and to end.
COMES_S=5
FETCH_S=30
# Per cent of a GPU's time.
GPU_WORKS=5

tell_time() {
    read -r now rest </proc/uptime
    now=${now%%.*}
}

read_limits() {
    { read -r idle budget quiet tick armed && IFS= read -r terminals && IFS= read -r action; } 2>/dev/null <limits
}

save() {
    # A full disk must not stop it: what counts is in memory.
    { echo "$armed $boot $now $spent" >state.new && mv state.new state; } 2>/dev/null
    saved=$now
}

# resume: what was spent before this script was started anew.
resume() {
    spent=0 void=0 was_armed='' was_boot='' was_at=0 was_spent=0
    [ ! -f state ] || read -r was_armed was_boot was_at was_spent <state
    if [ "$was_armed" = "$armed" ]; then
        if [ "$was_boot" = "$boot" ]; then
            spent=$((was_spent + now - was_at))
        else
            spent=$((was_spent + now)) # the machine's start is paid for too
        fi
    fi
    # Who starts the machine again after it was powered off, or was being stopped from outside, wants to use it: these
    # limits are done with.
    for over in acted left; do
        if [ -f "$over" ] && read -r _ was_armed was_boot <"$over"; then
            if [ "$was_armed" = "$armed" ] && [ "$was_boot" != "$boot" ]; then
                void=1
            fi
        fi
    done
}

is_busy() {
    while IFS= read -r folder; do
        if running_job "$folder" || lives "$folder/fetching"; then
            return 0
        fi
    done <folders
    return 1
}

# What changes while something is done here, apart from runs.
marks() {
    while IFS= read -r folder; do
        stat -c '%n %Y %s' -- "$folder"/jobs/*/log
        # While the working tree arrives there is this.
        du -sb -- "$folder"/tree.new.*
    done <folders
    stat -c '%n %X %Y' -- "${terminals%/*}"/tty1 "${terminals%/*}"/ttyS0
}

people() {
    stat -c '%n %X %Y' -- "$terminals"/[0-9]*
}

gpu_works() {
    command -v nvidia-smi >/dev/null || return 1
    for share in $(timeout 20 nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits); do
        case $share in
            *[!0-9]*) ;;
            *) [ "$share" -lt "$GPU_WORKS" ] || return 0 ;;
        esac
    done
    return 1
}

# look: is this machine in use? The order is by what it costs to ask.
look() {
    if is_busy; then
        used=$now
        return
    fi
    seen=$(marks 2>/dev/null 9>&-)
    if [ "$seen" != "$marked" ]; then
        marked=$seen used=$now
    fi
    seen=$(people 2>/dev/null 9>&-)
    if [ "$seen" != "$there" ]; then
        there=$seen moved=$now
    fi
    if [ -n "$there" ] && [ $((now - moved)) -lt "$quiet" ]; then
        used=$now
    elif gpu_works 2>/dev/null 9>&-; then
        used=$now
    fi
}

power_off() {
    root=
    ! command -v sudo >/dev/null || root='sudo -n'
    if [ "$1" = again ]; then
        $root systemctl poweroff --force || $root poweroff -f
    else
        $root shutdown -h now || $root systemctl poweroff || $root poweroff
    fi
}

# act REASON SENTENCE
act() {
    told=$armed
    read_limits && [ "$armed" = "$told" ] || return 0 # armed anew in this moment
    { echo "$1 $armed $boot" && echo "$2"; } >acted.new && mv acted.new acted
    save
    if [ "$1" = deadline ]; then
        while IFS= read -r folder; do
            ! running_job "$folder" || end_job "$folder" "$job"
        done <folders
        # Whoever follows the run fetches it now, and then ends the machine by its policy.
        waited=0
        while [ "$waited" -lt "$COMES_S" ] || { is_busy && [ "$waited" -lt "$FETCH_S" ]; }; do
            sleep 1 9>&-
            waited=$((waited + 1))
        done
    fi
    sync
    again=first
    # Until it is off, or is armed anew, or removed.
    while read_limits && [ "$armed" = "$told" ]; do
        case $action in
            poweroff) power_off "$again" ;;
            end)
                # The machine is somebody's own: nothing more is to be done here.
                printf '%s\n' "0 0 $quiet $tick $armed" "$terminals" end >limits.new && mv limits.new limits
                return
                ;;
            *) "$action" "$1" "$again" ;;
        esac >>log 2>&1 9>&-
        waited=0
        while [ "$waited" -lt "$FORCE_S" ] && read_limits && [ "$armed" = "$told" ]; do
            sleep "$tick" 9>&-
            waited=$((waited + tick))
        done
        again=again
    done
}

tell_time
used=$now moved=$now saved=$now last=$now began='' marked='' there=''
while read_limits; do
    tell_time
    if [ "$armed" != "$began" ]; then
        resume
        began=$armed used=$now last=$now
        save
    fi
    spent=$((spent + now - last)) last=$now
    [ $((now - saved)) -lt "$SAVE_S" ] || save
    look
    pause=$tick
    if [ "$budget" -gt 0 ] && [ "$void" -eq 0 ]; then
        left=$((budget - spent))
        [ "$left" -ge "$pause" ] || pause=$((left > 0 ? left : 1))
        [ "$left" -gt 0 ] || act deadline "its budget was spent: on for $((spent / 60)) min $((spent % 60)) s"
    fi
    if [ "$idle" -gt 0 ] && [ "$void" -eq 0 ] && [ $((now - used)) -ge "$idle" ] && ! is_busy; then
        act idle "idle for $(((now - used) / 60)) min $(((now - used) % 60)) s"
    fi
    sleep "$pause" 9>&-
done
rm -f pid
