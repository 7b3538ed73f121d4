if ! wants_gpu; then
    skip 'none, and a CPU run needs none'
elif [ -z "$python" ]; then
    skip 'needs Python'
elif "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("cuda.bindings") is None)' \
    >/dev/null 2>&1; then
    detail='its bindings are installed'
else
    detail='not found'
    problem=missing
fi
