torch_version=none
torch_cuda=none
if [ "$status_torch" = ok ]; then
    torch_version=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || torch_version=none
    case $torch_version in
        *+cu[0-9]*) torch_cuda=${torch_version##*+cu} torch_cuda=${torch_cuda%?}.${torch_cuda#"${torch_cuda%?}"} ;;
    esac
fi
echo "torch=$torch_version cuda=$torch_cuda dev=${gpu_name:-$cpu_model}"
if [ -n "$failed" ]; then
    echo "Preflight failed: $failed"
    exit 4
fi
echo 'Preflight OK'
