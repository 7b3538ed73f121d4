"""The errors that the package raises. Each message says what was wrong, what was expected and what to do."""

from __future__ import annotations


class InputError(ValueError):
    """The arguments of a call cannot be used: shape, dtype, device or layout."""


class DeviceError(RuntimeError):
    """The machine lacks something that the call needs: a driver, an architecture, a compiler, NVRTC."""


class CaptureError(DeviceError):
    """A kernel is not loaded, and none can be while a CUDA graph is captured; the same call works later."""


class NoKernelError(DeviceError):
    """No kernel takes this problem on this device."""


class BuildError(RuntimeError):
    """A kernel did not compile, or a compiled kernel could not be loaded."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class NoRoomError(BuildError):
    """The compile cache, or the folder of temporary files, takes no more. The kernel is not at fault."""


class KernelDefectError(BuildError):
    """A kernel compiled, and would compute right results, but spills, has a stack frame or serialised wgmma."""
