"""The CUDA driver: contexts, and loading cubins."""

from __future__ import annotations

import ctypes
import functools
import threading

from flashmoe_science.errors import BuildError, CaptureError, DeviceError, KernelDefectError
from flashmoe_science.jit.cache import read_artifact
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8
_SHARED_WITHOUT_OPT_IN = 48 * 1024
_LAST_SPECIAL_STREAM = 2  # CU_STREAM_PER_THREAD; before it 0 and CU_STREAM_LEGACY
_lock = threading.Lock()
_libraries: dict[str, ctypes.c_void_p] = {}
_functions: dict[tuple[str, int], ctypes.c_void_p] = {}
_refused: dict[str, tuple[str, str]] = {}
"""Message and log of the kernels that compiled with defects: they are refused again without a look at the cache."""


@functools.cache
def library() -> ctypes.CDLL:
    """libcuda, initialised. DeviceError where there is none, or no GPU that it can use."""
    try:
        loaded = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            "the NVIDIA driver (libcuda.so.1) was not found; install it, or use CPU tensors"
        ) from error
    check(loaded, loaded.cuInit(0), "cuInit")
    return loaded


def check(cuda: ctypes.CDLL, status: int, call: str) -> None:
    """DeviceError with the driver's own words unless `status` is success."""
    if status == 0:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(name))
    cuda.cuGetErrorString(status, ctypes.byref(text))
    words = ": ".join(part.value.decode() for part in (name, text) if part.value is not None)
    raise DeviceError(f"{call} failed with {words or status}")


def make_context_current(device: int) -> None:
    """Give this thread the device's primary context, unless it has one of that device."""
    cuda = library()
    context, current = ctypes.c_void_p(), ctypes.c_int(-1)
    check(cuda, cuda.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if context.value is not None:
        check(cuda, cuda.cuCtxGetDevice(ctypes.byref(current)), "cuCtxGetDevice")
    if current.value != device:
        check(
            cuda,
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
            "cuDevicePrimaryCtxRetain",
        )
        check(cuda, cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def load(kernel: CudaKernel, device: int, capturing: bool, *, allow_defects: bool = False) -> ctypes.c_void_p:
    """The kernel's function in the current context, which is the device's; compiled and loaded if need be.

    Args:
        capturing: a CUDA graph is being captured, so nothing may be loaded now.
        allow_defects: take a kernel that spills and the like, see `compile_kernel`.

    Raises:
        KernelDefectError: the kernel has such a defect.
        DeviceError: there is no driver or no NVRTC.
        CaptureError: the kernel is not loaded and a graph is being captured.
        BuildError: the kernel does not compile, or the driver refuses the cubin.
    """
    text = f"{kernel.directory}/{kernel.source}:{kernel.architecture}:{kernel.label}"
    name = text, device
    if not allow_defects and text in _refused:
        raise KernelDefectError(*_refused[text])
    function = _functions.get(name)
    if function is not None:
        return function
    if capturing:
        raise CaptureError(
            f"{kernel.label} is not loaded yet, and kernels cannot be loaded while a CUDA graph is captured; "
            "call the function once with these shapes before capturing"
        )
    with _lock:
        function = _functions.get(name)
        if function is None:
            try:
                function = _functions[name] = _load(kernel, allow_defects)
            except KernelDefectError as defect:
                _refused[text] = str(defect), defect.log
                raise
    return function


def has_default_priority(stream: int) -> bool:
    """Whether a stream, a raw handle, has the priority that streams have unless they ask for another."""
    if stream <= _LAST_SPECIAL_STREAM:
        return True
    priority = ctypes.c_int()
    cuda = library()
    status = cuda.cuStreamGetPriority(ctypes.c_void_p(stream), ctypes.byref(priority))
    check(cuda, status, "cuStreamGetPriority")
    return priority.value == 0


def needs_opt_in(dynamic_bytes: int, static_bytes: int) -> bool:
    """Whether a launch is refused unless the function was told how much dynamic shared memory it gets."""
    return dynamic_bytes + static_bytes > _SHARED_WITHOUT_OPT_IN


def _load(kernel: CudaKernel, allow_defects: bool) -> ctypes.c_void_p:
    build = compile_kernel(kernel, allow_defects=allow_defects)
    cuda = library()
    handle = _libraries.get(build.key)
    if handle is None:
        handle = ctypes.c_void_p()
        cubin = read_artifact(build)
        status = cuda.cuLibraryLoadData(ctypes.byref(handle), cubin, None, None, 0, None, None, 0)
        if status != 0:
            try:
                check(cuda, status, "loading")
            except DeviceError as error:
                raise BuildError(
                    f"the driver refused {kernel.label} for {kernel.architecture} ({error}); "
                    "is the driver older than NVRTC, or the GPU of another architecture?"
                ) from error
        _libraries[build.key] = handle
    entry, function = ctypes.c_void_p(), ctypes.c_void_p()
    status = cuda.cuLibraryGetKernel(ctypes.byref(entry), handle, kernel.function.encode())
    check(cuda, status, "cuLibraryGetKernel")
    # The function of this context rather than the context-free kernel: fetching it loads the code now, not at
    # the first launch, which may be under capture.
    check(cuda, cuda.cuKernelGetFunction(ctypes.byref(function), entry), "cuKernelGetFunction")
    static_bytes = build.resources.static_shared_bytes if build.resources is not None else 0
    if needs_opt_in(kernel.dynamic_shared_bytes, static_bytes):
        status = cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, kernel.dynamic_shared_bytes)
        check(cuda, status, "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)")
    if kernel.cluster_blocks > _PORTABLE_CLUSTER:
        status = cuda.cuFuncSetAttribute(function, _NON_PORTABLE_CLUSTER, 1)
        check(cuda, status, "cuFuncSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)")
    return function
