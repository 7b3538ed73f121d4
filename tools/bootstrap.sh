#!/bin/sh
# usage: tools/bootstrap.sh [--device auto|cpu|cuda|cuda:N] [--no-preflight]
# From a bare Debian or Ubuntu (with the NVIDIA driver, for a GPU) to "Preflight OK", or to the one reason why not.
# --no-preflight ends before it, for who runs it next anyway.
# Root, or sudo without a password, is used for a missing Python only. A second run changes nothing. Exits 0 or 4.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
device=auto
preflight=1
while [ $# -gt 0 ]; do
    case $1 in
        --device)
            device=${2:-}
            shift $(($# > 1))
            ;;
        --device=*) device=${1#--device=} ;;
        --no-preflight) preflight= ;;
        -h | --help)
            sed -n '/^# usage/,/^# Root/{s/^# //p;}' "$0"
            exit 0
            ;;
        *)
            echo "error: $1: expected --device auto, cpu, cuda or cuda:N, or --no-preflight" >&2
            exit 2
            ;;
    esac
    shift
done
case $device in
    auto | cpu | cuda | cuda:[0-9] | cuda:[0-9][0-9]) ;;
    *)
        echo "error: --device $device: expected auto, cpu, cuda or cuda:N" >&2
        exit 2
        ;;
esac
. "$root/scripts/environment.sh"

say() {
    printf '==> %s\n' "$*" >&2
}

can_write() {
    # By a name that nobody can have put there before: the folder may be one that others write to as well.
    probe=$(mktemp "$1/.cudadent42-probe-XXXXXX" 2>/dev/null) && rm -f "$probe"
}

# GiB that an environment takes: torch for CUDA brings its libraries along.
CPU_GIB=3
CUDA_GIB=10
# How long another program of the system's packages is waited for.
APT_LOCK_S=300

has_gpu() {
    case $device in
        cpu) return 1 ;;
        cuda*) return 0 ;;
    esac
    grep -qs '^0x10de$' /sys/bus/pci/devices/*/vendor || [ -e /dev/nvidia0 ] || [ -e /dev/dxg ]
}

check_folder() {
    can_write "$root" || fail "$root cannot be written, and the environment goes there. Copy the project to a folder" \
        "that can, for example" "  copy=\$(mktemp -d) && cp -r $(quoted "$root/.") \"\$copy\" && \"\$copy/tools/bootstrap.sh\""
    home=${HOME:-}
    cache=${FLASHMOE_CACHE_DIR:-${XDG_CACHE_HOME:-$home/.cache}}
    while [ -n "$cache" ] && [ ! -d "$cache" ]; do
        cache=$(dirname "$cache")
    done
    can_write "${cache:-/}" || fail "${cache:-/} cannot be written, and compiled kernels are kept there. Name another folder:" \
        "  export FLASHMOE_CACHE_DIR=/path/to/a/folder"
}

check_space() {
    needed=$CPU_GIB
    if has_gpu; then
        needed=$CUDA_GIB
    fi
    # What stands before the percentage; the names around may have spaces in them.
    free=$(df -Pk "$root" 2>/dev/null | sed -n '2s/.* \([0-9][0-9]*\)  *[0-9]*%.*/\1/p')
    [ -n "$free" ] || return 0 # this file system does not say
    free=$((free / 1048576))
    [ "$free" -ge "$needed" ] ||
        fail "$free GiB are free at $root; the environment takes $needed. Make space, or copy the project elsewhere:" \
            "  df -h $(quoted "$root")"
}

check_network() {
    CUDADENT42_FETCHES=1 "$root/tools/preflight.sh" --device "$device" 2>/dev/null |
        sed -n '/^fail  network/,/fix:/p' | grep . >&2 || return 0
    exit 4
}

# as_root COMMAND...: fails where this user cannot become root unasked.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        sudo -n "$@"
    else
        return 1
    fi
}

has_python() {
    for base in ${CUDADENT42_BASE_PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if is_recent "$base" && "$base" -c 'import venv' 2>/dev/null; then
            return 0
        fi
    done
    return 1
}

bring_python() {
    command -v apt-get >/dev/null 2>&1 ||
        fail "there is no Python of 3.10 or newer, and no apt-get to install one with. Install it, then run again:" "  $self"
    as_root true || fail "there is no Python of 3.10 or newer, and this user cannot install one. As an administrator:" \
        "  apt-get install python3 python3-venv ca-certificates"
    say 'Installing Python with apt-get'
    log=$(mktemp)
    # A source that fails is no reason, if the others have Python. A fresh machine is often busy with its own updates.
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update --quiet >"$log" 2>&1 || say 'apt-get update had errors'
    if ! as_root env DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends \
        --option "DPkg::Lock::Timeout=$APT_LOCK_S" python3 python3-venv ca-certificates >>"$log" 2>&1; then
        tail -n 15 "$log" >&2
        rm -f "$log"
        fail 'apt-get could not install Python; its last lines are above. When that is mended, run again:' "  $self"
    fi
    rm -f "$log"
    has_python || fail "this system's python3 is $(python3 --version 2>&1); 3.10 or newer is needed. Name another:" \
        "  CUDADENT42_BASE_PYTHON=/path/to/python3 $self"
}

bring_compiler() {
    if has_gpu || "$python" -c 'from flashmoe_science.jit.host import find_compiler; find_compiler()' 2>/dev/null; then
        return
    fi
    say 'Installing a C++ compiler into .venv (the ziglang wheel)'
    if [ -n "$lock" ]; then
        install_locked compiler && return
    fi
    "$python" -m pip install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" \
        --editable "${root}[compiler]" >&2 || fail 'pip could not install a compiler; see above. Install one and run again:' \
        '  apt-get install g++' "  $self"
}

bring_gpu_watch() {
    if has_gpu && ! "$python" -c 'import pynvml' 2>/dev/null; then
        if [ -n "$lock" ]; then
            install_locked gpu && return
        fi
        "$python" -m pip install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" \
            --editable "${root}[gpu]" >&2 || say 'nvidia-ml-py could not be installed: clocks will not be watched'
    fi
}

is_ready() {
    [ "$(cat "$root/.venv/.bootstrapped" 2>/dev/null)" = "$(ready_stamp)" ] && is_recent "$root/.venv/bin/python"
}

ready_stamp() {
    echo "$root $device $(packages_sum)"
}

# A Python that is named is used as it is: nothing is made or installed.
if [ -n "${CUDADENT42_PYTHON:-}" ]; then
    check_folder
    prepare_environment ""
    [ -n "$preflight" ] || exit 0
    exec "$python" -m cudadent42 preflight --device "$device"
fi
if ! is_ready; then
    check_folder
    has_python || bring_python
    # Space and network matter only while something has to be fetched.
    [ -x "$root/.venv/bin/python" ] || check_space
    check_network
    prepare_environment ""
    quiet=--quiet log=$root/.venv/pip.log
    choose_lock
    bring_compiler
    bring_gpu_watch
    ready_stamp >"$root/.venv/.bootstrapped"
fi
[ -n "$preflight" ] || exit 0
exec "$root/.venv/bin/python" -m cudadent42 preflight --device "$device"
