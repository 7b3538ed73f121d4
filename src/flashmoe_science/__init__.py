"""Attention and mixture-of-experts kernels, compiled on this machine at first use."""

from typing import TYPE_CHECKING, Any

from flashmoe_science.errors import BuildError, DeviceError, InputError

if TYPE_CHECKING:
    from flashmoe_science.attention import flash_attention

__all__ = ["BuildError", "DeviceError", "InputError", "flash_attention"]


def __getattr__(name: str) -> Any:
    # torch takes over a second to import. Who needs only `jit` (the lab's command line, and its preflight,
    # which must also run where torch is missing) does not pay for it.
    if name == "flash_attention":
        from flashmoe_science.attention import flash_attention

        globals()[name] = flash_attention
        return flash_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
