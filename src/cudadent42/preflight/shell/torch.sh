if [ -z "$python" ]; then
    skip 'needs Python'
elif ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
    >/dev/null 2>&1; then
    detail='not installed'
    problem=missing
else
    # From its version.py alone: importing it takes seconds, and preflight in Python does. The metadata of the wheels on
    # PyPI do not say what they are built for.
    said=$("$python" -c '
import importlib.util as u, pathlib
s = u.spec_from_file_location("torch_version", pathlib.Path(u.find_spec("torch").origin).with_name("version.py"))
m = u.module_from_spec(s)
s.loader.exec_module(m)
print(m.__version__, getattr(m, "cuda", None) or "none")' 2>/dev/null) || said='unknown unknown'
    torch_version=${said% *}
    torch_cuda=${said##* }
    v_version=$torch_version
    detail=$torch_version
    case $torch_version in
        [01].* | 2.[0-9] | 2.[0-9].*) problem=old ;;
    esac
fi
