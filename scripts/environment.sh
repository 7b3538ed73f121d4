# shellcheck shell=sh disable=SC2154
# The project's own Python environment. Sourced by run.sh and test.sh, which set $root; sets $python.
#
# CUDADENT42_PYTHON=/path/to/python3   use that Python as it is, with the packages it has, and install nothing
# CUDADENT42_BASE_PYTHON=/path/to/python3   make .venv with that Python instead of the first that is found

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
    stamp="$root $(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
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

install_group() {
    quiet=--quiet
    if [ -t 2 ]; then
        quiet=
    fi
    echo "Installing the packages to $1 into .venv (once)" >&2
    if [ "$1" = run ]; then
        set -- --editable "${root}[lab,ledger]"
    else
        # Dependency groups need a recent pip.
        "$python" -m pip install $quiet 'pip>=25.1' >&2 || fail "pip could not be brought up to date; see above"
        set -- --group "$root/pyproject.toml:$1"
    fi
    log=$root/.venv/pip.log
    rm -f "$log"
    "$python" -m pip install $quiet --disable-pip-version-check --constraint "$root/constraints.txt" --log "$log" "$@" >&2 && return
    if grep -qs 'No space left on device' "$log"; then
        fail "there was no space left for the packages, in $root or for temporary files (${TMPDIR:-/tmp}). Make some, or" \
            "name a folder with more for the latter:" "  TMPDIR=/path/to/a/folder $self"
    fi
    fail "pip could not install the packages; see above. A Python that has torch can be used as it is:" \
        "  CUDADENT42_PYTHON=/path/to/python3 $self"
}
