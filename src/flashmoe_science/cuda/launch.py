"""Launching kernels.

Launches go through ctypes and cuLaunchKernelEx, whose arguments are converted once: cuLaunchKernel with eleven
Python integers costs more than the launch itself.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.driver import check, library, load
from flashmoe_science.jit.nvrtc import CudaKernel

_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
ADDRESSES = struct.Struct("5Q")
"""Of query, key, value, output and lse; as many as the most called kernels take."""
Launch = Callable[..., None]
"""Launches on a raw stream: (*addresses, stream), in the operation's order: of the first elements of its inputs, of its
results (0 for one that is not asked for), and of the workspace if the plan has one.
"""


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with an integer value."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Launcher:
    """A kernel with its grid, and the buffer from which its one by-value argument is read.

    The buffer is read during the call, so each thread needs a launcher of its own.
    """

    __slots__ = ("again", "arguments", "buffer", "config", "entry", "function", "start", "start_at", "twin")

    def __init__(
        self,
        function: ctypes.c_void_p,
        grid: tuple[int, int, int],
        kernel: CudaKernel,
        argument_bytes: int,
        *,
        dependent: bool = False,
    ) -> None:
        """`dependent`: the kernel may start while its predecessor in the stream still runs (programmatic stream
        serialization, sm_90 and later). Only for kernels of which every thread executes griddepcontrol.wait before
        it reads or writes global memory, and griddepcontrol.launch_dependents, if at all, after that. One that is
        always launched after one of these may read what was there before that one, and one that is always followed by
        one of these may let it start before it has waited itself: moe.few and moe.hopper say why they do.
        """
        self.buffer = _aligned_buffer(argument_bytes, 64)
        """Writable; the struct that the kernel gets."""
        # Pointers keep what they point to: `again` and `start` may outlive the launcher.
        arguments = (ctypes.POINTER(type(self.buffer)) * 1)(ctypes.pointer(self.buffer))
        attribute = _LaunchAttribute(id=_PROGRAMMATIC_SERIALIZATION, value=1)
        config = _LaunchConfig(
            grid=grid,
            block=(kernel.threads_per_block, 1, 1),
            shared_bytes=kernel.dynamic_shared_bytes,
            attributes=ctypes.pointer(attribute),
            attribute_count=int(dependent),
        )
        self.arguments, self.function = arguments, function
        """What the driver is passed beside the configuration: an array of the buffer's address, and the kernel."""
        self.twin = functools.partial(Launcher, function, grid, kernel, argument_bytes, dependent=dependent)
        """Makes another one, with a buffer of its own."""
        self.config = config
        """Its ``grid`` and ``stream`` may be changed between launches."""
        # A closure: its names are looked up faster than attributes, and it is called without a bound method.
        launch, reference = library().cuLaunchKernelEx, ctypes.byref(config)
        self.entry = launch
        """The driver's function."""

        def start(stream: int) -> None:
            config.stream = stream
            status = launch(reference, function, arguments, None)
            if status != 0:
                check(library(), status, "cuLaunchKernelEx")

        buffer, pack = self.buffer, ADDRESSES.pack_into

        def start_at(query: int, key: int, value: int, output: int, lse: int, stream: int) -> None:
            pack(buffer, 0, query, key, value, output, lse)
            config.stream = stream
            status = launch(reference, function, arguments, None)
            if status != 0:
                check(library(), status, "cuLaunchKernelEx")

        self.start = start
        """Launches on a raw stream handle."""
        self.again: Callable[[], int] = functools.partial(launch, reference, function, arguments, None)
        """Launches on the configuration's stream; the driver's status, see `driver.check`. No frame of Python."""
        self.start_at = start_at
        """Writes five addresses to the head of the argument, then launches: a `Launch`. For kernels whose argument
        begins so; in one frame, because every call of attention goes through it. See `addressed` for other numbers.
        """


def clusters_at_once(function: ctypes.c_void_p, kernel: CudaKernel) -> int:
    """How many of a kernel's clusters the current device runs at a time."""
    config = _LaunchConfig(
        grid=(kernel.cluster_blocks, 1, 1),
        block=(kernel.threads_per_block, 1, 1),
        shared_bytes=kernel.dynamic_shared_bytes,
    )
    count = ctypes.c_int()
    status = library().cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config))
    check(library(), status, "cuOccupancyMaxActiveClusters")
    return count.value


def type_macros(dtype: torch.dtype) -> dict[str, int]:
    """Those of `kernels/cuda/types.cuh`, on sm_80 and later."""
    return {"ELEMENT_BF16": int(dtype == torch.bfloat16), "NATIVE_CP_ASYNC": 1, "MMA_K": 16}


def loaded(
    kernel: CudaKernel,
    device: Device,
    grid: tuple[int, int, int],
    argument_bytes: int,
    *,
    dependent: bool = False,
    allow_defects: bool = False,
) -> Launcher:
    """Of a kernel that is compiled (or found) and loaded now, see `driver.load`. The device is current."""
    capturing = torch.cuda.is_current_stream_capturing()
    function = load(kernel, device.index, capturing, allow_defects=allow_defects)
    return Launcher(function, grid, kernel, argument_bytes, dependent=dependent)


@dataclass(frozen=True)
class LaunchPlan:
    """A prepared launch: everything but the addresses. Belongs to one thread and one device."""

    launch: Launch
    workspace_bytes: int = 0
    """Of device memory with any content, starting at a multiple of 256 bytes, that a launch takes for itself."""


def addressed(launcher: Launcher, addresses: struct.Struct) -> Launch:
    """The launch of a kernel whose argument begins with these addresses: a struct of ``Q`` alone."""
    buffer, start, pack = launcher.buffer, launcher.start, addresses.pack_into

    def launch(*given: int) -> None:
        pack(buffer, 0, *given[:-1])
        start(given[-1])

    return launch


def _aligned_buffer(size: int, alignment: int) -> ctypes.Array[ctypes.c_char]:
    storage = ctypes.create_string_buffer(size + alignment)
    start = -ctypes.addressof(storage) % alignment
    return (ctypes.c_char * size).from_buffer(storage, start)
