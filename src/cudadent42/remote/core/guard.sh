# The watchdog of a machine, seen from outside. Sent with every call, after processes.sh.
#
#   guard.sh arm    FOLDER IDLE BUDGET QUIET TICK TERMINALS ACTION KEEPER BYTES   installs the script on standard input, which has
#                   so many bytes, or gives the one that is there new limits; prints who keeps it alive. KEEPER: auto, or one
#                   of those. Where it is to power the machine off already, and ACTION is end, it goes on so, with the
#                   smaller budget
#   guard.sh report                   prints what it is set to, and what it did
#   guard.sh disarm ACTION            no limit holds from now on, unless a run goes on; it stays for the next arming. Not where
#                                     another action is to follow: any, or the only one that is given up
#   guard.sh leave                    the limits hold until the machine is off, and not after its next start
#   guard.sh remove                   ends it; nothing of it stays
#
# One for all folders of this user, because a machine is powered off as a whole. It is in HOME, by a name that cron and
# systemd can be given without any quoting of ours.
command=$1
shift
umask 077
guard=$HOME/.local/state/cudadent42/watchdog
UNIT=cudadent42-watchdog-$(id -u).service
UNITS=/etc/systemd/system
TAG='# cudadent42 watchdog'

# Where there is sudo, it decides, for root too.
root=
! command -v sudo >/dev/null || root='sudo -n'

can_be_root() {
    if [ -n "$root" ]; then
        $root true 2>/dev/null
    else
        [ "$(id -u)" -eq 0 ]
    fi
}

# Who can start it again: after a restart of the machine, or when it was ended.
choose_keeper() {
    if [ -d /run/systemd/system ] && can_be_root && systemd_runs; then
        echo systemd
    elif command -v crontab >/dev/null && cron_runs; then
        echo cron
    else
        echo process
    fi
}

systemd_runs() {
    case $($root systemctl is-system-running 2>/dev/null) in
        running | degraded | starting | initializing) ;;
        *) return 1 ;;
    esac
}

cron_runs() {
    for name in /proc/[0-9]*/comm; do
        { read -r line <"$name"; } 2>/dev/null || continue
        case $line in cron | crond) return 0 ;; esac
    done
    return 1
}

# The service runs as this user, so that no one else's rights are lent to a file that this user can change.
unit() {
    cat <<EOF
[Unit]
Description=Powers this machine off when it is idle or its budget is spent

[Service]
User=$(id -u)
ExecStart=/bin/sh -c 'exec /bin/sh "\$\$HOME/.local/state/cudadent42/watchdog/watchdog.sh"'
Nice=19
Restart=always
RestartSec=30

[Install]
WantedBy=multi-user.target
EOF
}

without_ours() {
    crontab -l 2>/dev/null | grep -vF "$TAG"
}

keep() {
    case $1 in
        systemd)
            unit | $root tee "$UNITS/$UNIT" >/dev/null && $root chmod 644 "$UNITS/$UNIT" && $root systemctl daemon-reload &&
                $root systemctl --quiet enable "$UNIT" && $root systemctl restart "$UNIT"
            ;;
        cron)
            # shellcheck disable=SC2016 # cron's shell is to expand it
            line='sh "$HOME/.local/state/cudadent42/watchdog/watchdog.sh"'
            {
                without_ours
                echo "@reboot $line $TAG"
                echo "*/5 * * * * $line $TAG"
            } | crontab - && launch
            ;;
        process) launch ;;
        *) return 64 ;;
    esac
}

launch() {
    setsid nice -n 19 sh "$guard/watchdog.sh" </dev/null >/dev/null 2>&1 &
}

comes_alive() {
    tries=0
    until lives "$guard/pid"; do
        [ "$tries" -lt 100 ] || return 1
        sleep 0.1
        tries=$((tries + 1))
    done
}

# end_it: every keeper lets go of it, whichever was used.
end_it() {
    if [ -f "$UNITS/$UNIT" ]; then
        $root systemctl --quiet disable --now "$UNIT"
        $root rm -f "$UNITS/$UNIT" && $root systemctl daemon-reload
    fi
    if command -v crontab >/dev/null && crontab -l 2>/dev/null | grep -qF "$TAG"; then
        without_ours | crontab -
    fi
    tries=0
    while lives "$guard/pid" && [ "$tries" -lt 50 ]; do
        kill -TERM "$pid" 2>/dev/null
        sleep 0.1
        tries=$((tries + 1))
    done
    ! lives "$guard/pid"
}

# run_goes_on: sets $job to a run in one of the folders.
run_goes_on() {
    [ -f "$guard/folders" ] || return 1
    while IFS= read -r other; do
        ! running_job "$other" || return 0
    done <"$guard/folders"
    return 1
}

# limit IDLE BUDGET QUIET TICK TERMINALS ACTION: whole or not at all, and known as new by another word.
limit() {
    read -r armed </proc/sys/kernel/random/uuid
    printf '%s\n' "$1 $2 $3 $4 $armed" "$5" "$6" >"$guard/limits.new" && mv -- "$guard/limits.new" "$guard/limits"
}

read_limits() {
    { read -r idle budget quiet tick armed && IFS= read -r terminals && IFS= read -r action; } <"$guard/limits"
}

# is_over: the machine was started again after these limits were kept, or left to hold until it was off.
is_over() {
    read -r boot </proc/sys/kernel/random/boot_id
    for over in left acted; do
        if [ -f "$guard/$over" ] && read -r _ of was <"$guard/$over"; then
            [ "$of" != "$armed" ] || [ "$was" = "$boot" ] || return 0
        fi
    done
    return 1
}

# is_left: these limits hold until the machine is off, and not after.
is_left() {
    [ -f "$guard/left" ] && read -r _ of _ <"$guard/left" && [ "$of" = "$armed" ]
}

leave() {
    read -r boot </proc/sys/kernel/random/boot_id
    echo "left $armed $boot" >"$guard/left.new" && mv -- "$guard/left.new" "$guard/left"
}

# powers_off: the limits that are there will do more than end a run. Reads them.
powers_off() {
    [ -f "$guard/limits" ] && read_limits && [ "$action" != end ] && [ $((idle + budget)) -gt 0 ] && ! is_over
}

# tell_rest: sets $budget to what is left of it, where there is one.
tell_rest() {
    [ "$budget" -gt 0 ] && [ -f "$guard/state" ] && read -r of was at spent <"$guard/state" && [ "$of" = "$armed" ] || return 0
    read -r now _ </proc/uptime
    read -r boot </proc/sys/kernel/random/boot_id
    [ "$was" = "$boot" ] || at=0
    budget=$((budget - spent - ${now%%.*} + at))
    [ "$budget" -gt 0 ]
}

case $command in
    arm)
        folder=$1 keeper=$8 bytes=$9
        case $folder in /*) ;; *) folder=$HOME/$folder ;; esac
        if run_goes_on; then
            echo "$job"
            return 75 # its limits are not to be changed
        fi
        [ "$7" != poweroff ] || can_be_root || return 77
        command -v flock >/dev/null || return 78
        left=no
        if [ "$7" = end ] && powers_off; then
            # Of whoever started the machine: nobody else may ever end it.
            tell_rest || return 80
            if [ "$3" -gt 0 ] && { [ "$budget" -eq 0 ] || [ "$3" -lt "$budget" ]; }; then
                budget=$3
            fi
            ! is_left || left=yes
        else
            idle=$2 budget=$3 quiet=$4 tick=$5 terminals=$6 action=$7
        fi
        mkdir -p -- "$guard" && cat >"$guard/watchdog.new" || return 71
        # A connection that was cut ends it too; the one that is there goes on then.
        [ "$(wc -c <"$guard/watchdog.new")" -eq "$bytes" ] || return 74
        [ "$keeper" != auto ] || keeper=$(choose_keeper)
        stays=yes
        if ! lives "$guard/pid" || ! cmp -s "$guard/watchdog.new" "$guard/watchdog.sh" || [ "$(cat "$guard/keeper")" != "$keeper" ]; then
            stays=no
            end_it || return 79
        fi
        mv -- "$guard/watchdog.new" "$guard/watchdog.sh" && rm -f -- "$guard/acted" "$guard/left" || return 71
        grep -qxF -- "$folder" "$guard/folders" 2>/dev/null || printf '%s\n' "$folder" >>"$guard/folders"
        limit "$idle" "$budget" "$quiet" "$tick" "$terminals" "$action" || return 71
        [ "$left" = no ] || leave
        if [ "$stays" = no ]; then
            if ! { keep "$keeper" && comes_alive; }; then
                keeper=process
                launch
                comes_alive || return 79
            fi
            echo "$keeper" >"$guard/keeper"
        fi
        echo "$keeper"
        ;;
    report)
        [ -f "$guard/limits" ] || return 0
        read_limits
        ! is_over || idle=0 budget=0
        echo "keeper $(cat "$guard/keeper")"
        echo "idle_s $idle"
        echo "budget_s $budget"
        echo "action $action"
        if lives "$guard/pid"; then
            echo "watches yes"
        else
            echo "watches no"
        fi
        if [ -f "$guard/state" ]; then
            read -r of rest <"$guard/state"
            # Of an earlier arming there is nothing to be said.
            [ "$of" != "$armed" ] || echo "spent_s ${rest##* }"
        fi
        if [ -f "$guard/acted" ]; then
            { read -r reason rest && IFS= read -r text; } <"$guard/acted"
            echo "acted $reason"
            echo "because $text"
        fi
        ;;
    leave)
        if [ -f "$guard/limits" ] && read_limits; then
            leave
        fi
        ;;
    disarm)
        if [ -f "$guard/limits" ] && ! run_goes_on; then
            read_limits && case $1 in any | "$action") ;; *) return 0 ;; esac && limit 0 0 "$quiet" "$tick" "$terminals" "$action" && rm -f -- "$guard/acted"
        fi
        ;;
    remove)
        end_it || return 79
        rm -rf -- "$guard"
        ;;
    *) return 64 ;;
esac
