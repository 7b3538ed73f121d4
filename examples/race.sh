#!/bin/sh
# A small race of the plug-in beside this file: preflight, verification, timing, report.
#
#     examples/race.sh [further options of `cudadent42 run`]
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec "$here/../run.sh" --suite small --case tiny --dtype bf16 --device cpu \
    --implementation "cudadent42,$here/my_attention.py:attention" "$@"
