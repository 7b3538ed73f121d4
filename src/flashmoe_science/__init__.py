"""Attention and mixture-of-experts kernels, compiled on this machine at first use."""

from flashmoe_science.attention import flash_attention
from flashmoe_science.errors import BuildError, DeviceError, InputError

__all__ = ["BuildError", "DeviceError", "InputError", "flash_attention"]
