v_reason='no C++ compiler was found'
for candidate in ${CXX:+"$CXX"} c++ g++ clang++; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if echo 'int main() { return 0; }' | "$candidate" -x c++ -fsyntax-only - >/dev/null 2>&1; then
        detail="$("$candidate" --version 2>/dev/null | head -n 1): $candidate"
        break
    fi
    v_reason="$candidate does not compile an empty program"
done
if [ -z "$detail" ] && [ -n "$python" ] &&
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("ziglang") is None)' 2>/dev/null; then
    detail='the ziglang wheel'
fi
if [ -z "$detail" ]; then
    detail='none that runs'
    problem=missing
    if wants_gpu; then
        problem=missing-gpu
    fi
fi
