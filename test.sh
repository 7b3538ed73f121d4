#!/bin/sh
# Makes the project's environment if it is not there, with the tools of the tests, then runs pytest with the
# arguments given. See scripts/environment.sh for the variables.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$root/scripts/environment.sh"
prepare_environment dev
"$python" -c 'import hypothesis, pytest, pytest_timeout, xdist' 2>/dev/null ||
    fail "$python lacks the tools of the tests. Install them with" \
        "  $python -m pip install pytest pytest-timeout pytest-xdist hypothesis"
cd "$root"
# Each process of tests takes ten seconds to rewrite their assertions, and each interpreter that a test starts two to
# compile the lab, unless what was compiled is kept.
unset PYTHONDONTWRITEBYTECODE
exec "$python" -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal "$@"
