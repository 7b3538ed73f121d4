#!/bin/sh
# usage: tools/build.sh FOLDER
# Builds the source archive and the wheel into FOLDER, the same bytes for the same commit, in an environment of their own.
# PYTHON names a Python that has hatchling already, which then builds without a network.
set -eu
[ $# -eq 1 ] || { echo "usage: tools/build.sh FOLDER" >&2; exit 2; }
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
mkdir -p "$1"
folder=$(CDPATH='' cd -- "$1" && pwd)
if [ -n "${PYTHON:-}" ]; then
    builder=$PYTHON
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    python3 -m venv "$work/env"
    builder=$work/env/bin/python
    "$builder" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \
        --requirement "$root/requirements/build.txt"
fi
cd "$root"
umask 022
"$builder" -m hatchling build --directory "$folder"
