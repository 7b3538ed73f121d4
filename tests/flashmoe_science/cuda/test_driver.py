"""The driver's side of a launch, as far as it goes without a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.cuda import driver
from flashmoe_science.cuda.driver import load, needs_opt_in
from flashmoe_science.errors import CaptureError, KernelDefectError
from flashmoe_science.jit.nvrtc import CudaKernel

# A stack frame: an array that is indexed by what is only known at run time.
_STACK_FRAME = """
extern "C" __global__ void stack_frame(int* x) {
    int v[64];
    for (int i = 0; i < 64; ++i) v[x[i] & 63] = i;
    x[threadIdx.x] = v[x[threadIdx.x] & 63];
}
"""


class _TwoDevices:
    """The context calls of libcuda, for a thread with a context (100 + device) or none (0)."""

    def __init__(self, current: int) -> None:
        self.current = current

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.current
        return 0

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device._obj.value = self.current - 100
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        context._obj.value = 100 + device
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        assert context.value is not None
        self.current = context.value
        return 0


@pytest.mark.parametrize("current", [0, 100, 101])
def test_the_devices_context_becomes_current(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _TwoDevices(current)
    monkeypatch.setattr(driver, "library", lambda: cuda)
    for device in (1, 0):
        driver.make_context_current(device)
        assert cuda.current == 100 + device


def test_static_shared_memory_counts_towards_what_needs_an_opt_in() -> None:
    """A tile of exactly 48 KB and a table beside it was launched without, and refused as an invalid value."""
    assert not needs_opt_in(48 << 10, 0)
    assert needs_opt_in(48 << 10, 1024)
    assert needs_opt_in(0, (48 << 10) + 1)


def test_nothing_is_loaded_while_a_graph_is_captured() -> None:
    """Which says nothing of calls that come later, unlike other errors of a machine."""
    kernel = CudaKernel("never.cu", "never", "sm_90a", {}, threads_per_block=32, dynamic_shared_bytes=0)
    with pytest.raises(CaptureError, match="call the function once with these shapes before capturing"):
        load(kernel, 0, capturing=True)


@pytest.mark.usefixtures("nvrtc")
def test_a_kernel_with_defects_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And later refused at once, under capture too, where a kernel that is not loaded yet is another error."""
    monkeypatch.setenv("FLASHMOE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "frame.cu").write_text(_STACK_FRAME)
    kernel = CudaKernel("frame.cu", "stack_frame", "sm_90", {}, 128, 0, tmp_path, tmp_path)
    for capturing in (False, True):
        with pytest.raises(KernelDefectError, match=r"has a stack frame of \d+ bytes"):
            load(kernel, 0, capturing)
