# shellcheck disable=SC2034,SC2100,SC2154 # generated parts set more than each of them reads; a hyphen is no minus
#
# usage: tools/preflight.sh [--device auto|cpu|cuda|cuda:N]
# Preflight for a machine that has no Python packages yet: the checks of `cudadent42 preflight` as far as a shell
# can make them, with the same words. Exits 0 after "Preflight OK", else 4.
set -eu
LC_ALL=C
export LC_ALL

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
device=auto
while [ $# -gt 0 ]; do
    case $1 in
        --device)
            device=${2:-}
            [ $# -eq 1 ] || shift
            ;;
        --device=*) device=${1#--device=} ;;
        -h | --help)
            sed -n '/^# usage/,/^# can make/{s/^# //p;}' "$0"
            exit 0
            ;;
        *)
            echo "error: $1: expected --device auto, cpu, cuda or cuda:N" >&2
            exit 2
            ;;
    esac
    shift
done
case $device in
    auto | cpu | cuda) gpu_index=0 ;;
    cuda:[0-9] | cuda:[0-9][0-9]) gpu_index=${device#cuda:} ;;
    *)
        echo "error: --device $device: expected auto, cpu, cuda or cuda:N" >&2
        exit 2
        ;;
esac

# NVIDIA GPUs that the kernel sees, driver or not.
gpu_hardware=0
for entry in /sys/bus/pci/devices/*; do
    [ "$(cat "$entry/vendor" 2>/dev/null)" = 0x10de ] || continue
    case $(cat "$entry/class" 2>/dev/null) in 0x03*) gpu_hardware=$((gpu_hardware + 1)) ;; esac
done
for node in /dev/nvidia[0-9]* /dev/dxg; do
    if [ -e "$node" ] && [ "$gpu_hardware" -eq 0 ]; then
        gpu_hardware=1
    fi
done
gpu_works=
gpu_name=
driver_cuda=
torch_version=none
torch_cuda=none
cpu_model=
python=
nvcc=
v_version=

wants_gpu() {
    case $device in
        cuda*) return 0 ;;
        cpu) return 1 ;;
        *) [ "$gpu_hardware" -gt 0 ] ;;
    esac
}

skip() {
    detail=$1
    skipped=yes
}

# can_write FOLDER: tries, since root may "write" to a file system that is read-only.
can_write() {
    # By a name that nobody can have put there before: the folder may be one that others write to as well.
    probe=$(mktemp "$1/.cudadent42-probe-XXXXXX" 2>/dev/null) && rm -f "$probe"
}

loader_finds() {
    { ldconfig -p 2>/dev/null || /sbin/ldconfig -p 2>/dev/null; } | grep -q "$1" && return 0
    old_ifs=$IFS
    IFS=:
    for folder in ${LD_LIBRARY_PATH:-}; do
        if [ -e "$folder/$1" ]; then
            IFS=$old_ifs
            return 0
        fi
    done
    IFS=$old_ifs
    return 1
}

# within SECONDS COMMAND...: 124 where it took longer.
within() {
    if command -v timeout >/dev/null 2>&1; then
        timeout "$@"
    else
        shift
        "$@"
    fi
}

nvcc_release() {
    release=$("$1" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p' | head -n 1)
    echo "${release:-unknown}"
}

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    escape=$(printf '\033')
    colour_ok="${escape}[32m" colour_warn="${escape}[33m" colour_fail="${escape}[31m" colour_skip="${escape}[2m"
    colour_end="${escape}[0m"
else
    colour_ok='' colour_warn='' colour_fail='' colour_skip='' colour_end=''
fi
failed=

# show NAME STATUS: the check's line, its cause and its fix.
show() {
    eval "shade=\$colour_$2"
    printf '%s%-4s%s  %-*s  %s\n' "$shade" "$2" "$colour_end" "$NAME_WIDTH" "$1" "$detail"
    if [ -n "$cause" ]; then
        printf '%*s%s\n' $((NAME_WIDTH + 8)) '' "$cause"
        printf '%*sfix: %s\n' $((NAME_WIDTH + 8)) '' "$fix"
    fi
    if [ "$2" = fail ]; then
        failed="$failed${failed:+, }$1"
    fi
}
