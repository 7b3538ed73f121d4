"""Attention and mixture-of-experts kernels, compiled on this machine at first use."""
