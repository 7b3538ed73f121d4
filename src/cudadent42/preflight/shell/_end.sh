echo "torch=$torch_version cuda=$torch_cuda dev=${gpu_name:-$cpu_model}"
if [ -n "$failed" ]; then
    echo "Preflight failed: $failed"
    exit 4
fi
echo 'Preflight OK'
