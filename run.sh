#!/bin/sh
# Makes the project's environment if it is not there, then runs `cudadent42 run` with the arguments given.
# See docs/running.md, and scripts/environment.sh for the variables.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/scripts/environment.sh"
prepare_environment
exec "$python" -m cudadent42 run "$@"
