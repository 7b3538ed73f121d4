v_variable=FLASHMOE_CACHE_DIR
eval "v_directory=\${$v_variable:-}"
v_directory=${v_directory:-${XDG_CACHE_HOME:-$HOME/.cache}/flashmoe_science}
detail=$v_directory
if [ -d "$v_directory" ] && [ -O "$v_directory" ] && [ -n "$(find "$v_directory" -prune -perm /022 2>/dev/null)" ]; then
    problem=open
else
    existing=$v_directory
    while [ ! -d "$existing" ]; do
        existing=$(dirname "$existing")
    done
    if ! can_write "$existing"; then
        v_reason="cannot write to $existing, where compiled kernels are kept"
        problem=unusable
    fi
fi
