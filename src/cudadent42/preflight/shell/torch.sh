if [ -z "$python" ]; then
    skip 'needs Python'
elif ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
    >/dev/null 2>&1; then
    detail='not installed'
    problem=missing
else
    # Its version without importing it, which takes seconds; preflight in Python imports it.
    v_version=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || v_version=unknown
    detail=$v_version
    case $v_version in
        [01].* | 2.[0-9] | 2.[0-9].*) problem=old ;;
    esac
fi
