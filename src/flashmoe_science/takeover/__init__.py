"""PyTorch's own attention calls, taken over where the kernels take them and left as they were where not."""
