# shellcheck shell=sh disable=SC2154
# The project's own Python environment. Sourced by run.sh and test.sh, which set $root; sets $python.
#
# CUDADENT42_PYTHON=/path/to/python3   use that Python as it is, with the packages it has, and install nothing
# CUDADENT42_BASE_PYTHON=/path/to/python3   make .venv with that Python instead of the first that is found
# CUDADENT42_LOCK=auto|pypi|cpu|none   which of requirements/torch*.txt is installed, by hash; docs/dependencies.md

# quoted TEXT: as one word to copy into a shell.
quoted() {
    printf "'%s'" "$(printf '%s\n' "$1" | sed "s/'/'\\\\''/g")"
}
self=$(quoted "$0")

# fail MESSAGE [LINE...]: the further lines are commands to copy.
fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    for line in "$@"; do
        printf '%s\n' "$line" >&2
    done
    exit 4
}

is_recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_base_python() {
    if [ -n "${CUDADENT42_BASE_PYTHON:-}" ]; then
        is_recent "$CUDADENT42_BASE_PYTHON" ||
            fail "CUDADENT42_BASE_PYTHON=$CUDADENT42_BASE_PYTHON is not a Python of 3.10 or newer. Name another, or none:" \
                "  unset CUDADENT42_BASE_PYTHON"
        base=$CUDADENT42_BASE_PYTHON
        return
    fi
    for base in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if is_recent "$base"; then
            return
        fi
    done
    fail "no Python of 3.10 or newer on PATH. Install one, for example:" \
        "  sudo apt-get install python3 python3-venv"
}

make_environment() {
    find_base_python
    echo "Making .venv with $("$base" --version) ($(command -v "$base"))" >&2
    if "$base" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        "$base" -m venv --clear "$root/.venv" || fail "could not make $root/.venv with $base -m venv"
    elif "$base" -c 'import pip, venv' >/dev/null 2>&1; then
        # Debian splits ensurepip off; a pip that is there can fill an environment made without it.
        { "$base" -m venv --clear --without-pip "$root/.venv" &&
            "$base" -m pip --python "$root/.venv/bin/python" install --quiet pip; } ||
            fail "could not make $root/.venv with $base and its pip"
    elif "$base" -c 'import venv' >/dev/null 2>&1; then
        # Neither, as on a bare Ubuntu: pip runs from its own wheel, fetched from the package index.
        fetched=$(mktemp -d)
        { "$base" -m venv --clear --without-pip "$root/.venv" &&
            wheel=$("$base" "$root/scripts/fetch_pip.py" "$fetched") &&
            "$base" "$wheel/pip" --python "$root/.venv/bin/python" install --quiet pip; } || {
            rm -rf "$fetched"
            version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
            fail "$base has neither ensurepip nor pip, and pip could not be fetched; see above. Mend it with one of" \
                "  sudo apt-get install python$version-venv" \
                "  CUDADENT42_BASE_PYTHON=/path/to/another/python3 $self"
        }
        rm -rf "$fetched"
    else
        fail "$base lacks the module venv, so it cannot make an environment. Mend it with one of" \
            "  sudo apt-get install python3 python3-venv" \
            "  CUDADENT42_BASE_PYTHON=/path/to/another/python3 $self"
    fi
}

# prepare_environment [dev]: .venv with the package and, for dev, the tools of the tests. Nothing to do is fast.
prepare_environment() {
    if [ -n "${CUDADENT42_PYTHON:-}" ]; then
        is_recent "$CUDADENT42_PYTHON" ||
            fail "CUDADENT42_PYTHON=$CUDADENT42_PYTHON is not a Python of 3.10 or newer. Name another, or none:" \
                "  unset CUDADENT42_PYTHON"
        case $CUDADENT42_PYTHON in
            /*) python=$CUDADENT42_PYTHON ;;
            */*) python=$PWD/$CUDADENT42_PYTHON ;; # test.sh changes the folder
            *) python=$CUDADENT42_PYTHON ;;
        esac
        PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
        export PYTHONPATH
        return
    fi
    python=$root/.venv/bin/python
    # A stamp of what was installed; it is written last, so a set-up that was cut short is done again.
    stamp="$root $(packages_sum)"
    for group in run ${1:+"$1"}; do
        if [ "$(cat "$root/.venv/.stamp-$group" 2>/dev/null)" = "$stamp" ] && is_recent "$python"; then
            continue
        fi
        # Without pip it was cut short while it was made.
        { is_recent "$python" && "$python" -c 'import pip' >/dev/null 2>&1; } || make_environment
        install_group "$group"
        printf '%s\n' "$stamp" >"$root/.venv/.stamp-$group"
    done
}

# packages_sum: changes with what would be installed.
packages_sum() {
    for file in "$root/pyproject.toml" "$root/constraints.txt" "$root"/requirements/*.txt; do
        [ ! -f "$file" ] || cat "$file"
    done | cksum
    [ -z "${CUDADENT42_LOCK:-}" ] || echo "$CUDADENT42_LOCK"
}

# choose_lock: sets $lock to the file of torch whose hashes are asked for, or to nothing.
choose_lock() {
    lock=
    case ${CUDADENT42_LOCK:-auto} in
        pypi) lock=torch ;;
        cpu)
            # For macOS PyPI has it.
            case $(uname -s) in Darwin) lock=torch ;; *) lock=torch-cpu ;; esac
            ;;
        none) ;;
        auto)
            # Who names other sources of packages wants what those have: another build of torch, as a rule.
            if [ -f "$root/requirements/torch.txt" ] && is_locked_platform &&
                ! "$python" -m pip config list 2>/dev/null | grep -Eq '(index-url|find-links|constraint)='; then
                lock=torch
            fi
            ;;
        *) fail "CUDADENT42_LOCK=$CUDADENT42_LOCK: expected auto, pypi, cpu or none" ;;
    esac
}

# The platforms of requirements/*.txt: torch has no wheels for musl, older macOS, and Intel Macs.
is_locked_platform() {
    "$python" -c 'import platform, sys
machine = platform.machine()
linux = sys.platform == "linux" and machine in ("x86_64", "aarch64") and platform.libc_ver()[0] == "glibc"
mac = sys.platform == "darwin" and machine == "arm64" and int(platform.mac_ver()[0].split(".")[0]) >= 14
python = sys.implementation.name == "cpython" and (3, 10) <= sys.version_info[:2] <= (3, 14)
sys.exit(not ((linux or mac) and python))' 2>/dev/null
}

# install_locked NAME...: requirements/NAME.txt, every file by its hash.
install_locked() {
    files=
    for name in "$@"; do
        # Not quoted where it is used: the names have no spaces, and pip is started in their folder.
        files="$files --requirement $name.txt"
    done
    # shellcheck disable=SC2086
    (cd "$root/requirements" && "$python" -m pip install $quiet --disable-pip-version-check --require-hashes --no-deps \
        --only-binary :all: --log "$log" $files >&2)
}

# install_project: what is here, built with the packages that are locked.
install_project() {
    "$python" -m pip install $quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index \
        --log "$log" --editable "$root" >&2
}

install_group() {
    quiet=--quiet
    if [ -t 2 ]; then
        quiet=
    fi
    log=$root/.venv/pip.log
    rm -f "$log"
    choose_lock
    echo "Installing the packages to $1 into .venv (once)" >&2
    if [ -n "$lock" ]; then
        if [ "$1" = run ]; then
            install_locked "$lock" run && install_project && return
        else
            install_locked "$1" && return
        fi
        install_failed
    fi
    if [ "$1" = run ]; then
        set -- --editable "${root}[lab,ledger]"
    else
        # Dependency groups need a recent pip.
        "$python" -m pip install $quiet 'pip>=25.1' >&2 || fail "pip could not be brought up to date; see above"
        set -- --group "$root/pyproject.toml:$1"
    fi
    "$python" -m pip install $quiet --disable-pip-version-check --constraint "$root/constraints.txt" --log "$log" "$@" >&2 && return
    install_failed
}

install_failed() {
    if grep -qs 'No space left on device' "$log"; then
        fail "there was no space left for the packages, in $root or for temporary files (${TMPDIR:-/tmp}). Make some, or" \
            "name a folder with more for the latter:" "  TMPDIR=/path/to/a/folder $self"
    fi
    if grep -qs 'DO NOT MATCH THE HASHES' "$log"; then
        fail "a package is not the file that requirements/ names: the index, or something on the way, serves another. Where" \
            "that is meant, install without hashes:" "  CUDADENT42_LOCK=none $self"
    fi
    fail "pip could not install the packages; see above. A Python that has torch can be used as it is:" \
        "  CUDADENT42_PYTHON=/path/to/python3 $self"
}
