# The project's own environment where there is one, else the newest on PATH.
python=
for candidate in "$root/.venv/bin/python" python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    v_version=$("$candidate" -c 'import platform; print(platform.python_version())' 2>/dev/null) || continue
    detail="$v_version at $(command -v "$candidate")"
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$detail" ]; then
    detail='none on PATH'
    problem=missing
elif [ -z "$python" ]; then
    problem=old
fi
# As it stands in a fix, which is copied into a shell.
v_python=${python:-python3}
case $v_python in
    *[!A-Za-z0-9_./+-]*) v_python="'$(printf '%s\n' "$v_python" | sed "s/'/'\\\\''/g")'" ;;
esac
