if [ -z "$python" ]; then
    skip 'needs Python'
else
    # PACKAGES is "module requirement" on each line.
    v_missing=
    v_requirements=
    missing=0
    while read -r module requirement; do
        "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" \
            >/dev/null 2>&1 && continue
        missing=$((missing + 1))
        v_missing="$v_missing${v_missing:+, }${requirement%%>*}"
        v_requirements="$v_requirements${v_requirements:+ }'$requirement'"
    done <<PACKAGES_END
$PACKAGES
PACKAGES_END
    detail='all present'
    if [ -n "$v_missing" ]; then
        detail="$missing missing"
        problem=missing
    fi
fi
