if [ -z "$nvcc" ]; then
    skip 'no CUDA toolkit, and nothing here needs one'
else
    v_compiler=$(nvcc_release "$nvcc")
    toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
    v_header=
    # What the compiler would find first: the paths of the environment, then the toolkit's own.
    old_ifs=$IFS
    IFS=:
    for folder in ${CPATH:-} ${CPLUS_INCLUDE_PATH:-} ${C_INCLUDE_PATH:-} "$toolkit/include" /usr/include; do
        if [ -n "$folder" ] && [ -f "$folder/cuda.h" ]; then
            v_header=$folder/cuda.h
            break
        fi
    done
    IFS=$old_ifs
    if [ -z "$v_header" ]; then
        skip 'nvcc without headers'
    else
        v_version=$(sed -n 's/^#define CUDA_VERSION  *\([0-9]*\).*/\1/p' "$v_header" | head -n 1)
        v_version=$((${v_version:-0} / 1000)).$((${v_version:-0} % 1000 / 10))
        detail="$v_version in $v_header"
        if [ "$v_compiler" != unknown ] && [ "$v_version" != "$v_compiler" ]; then
            problem=mismatch
        fi
    fi
fi
