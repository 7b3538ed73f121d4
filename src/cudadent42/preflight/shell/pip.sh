if [ -z "$python" ]; then
    skip 'needs Python'
elif [ "$python" = "$root/.venv/bin/python" ] && "$python" -c 'import pip' >/dev/null 2>&1; then
    detail="in the project's .venv"
elif "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    detail='comes with Python'
elif "$python" -c 'import pip, venv' >/dev/null 2>&1; then
    detail='installed apart from Python'
else
    detail='neither pip nor ensurepip'
    problem=missing
fi
