"""A kernel file as an implementation: prepared once per case, then a launch per call. Imports torch when it runs."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from cudadent42.base.errors import UsageError
from cudadent42.base.processor import cpu_name
from cudadent42.model.implementations import Call, Implementation, UnsupportedCaseError, file_path
from cudadent42.native import kernels, specification
from cudadent42.native.problem import Problem, blocks, fill
from cudadent42.native.specification import Language, Specification
from cudadent42.native.tuned import tuned_for
from cudadent42.operations.attention.case import AttentionCase

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.operations.attention.inputs import AttentionInputs

_DONE = 0
_UNSUPPORTED = 1
"""CUDADENT42_DONE and CUDADENT42_UNSUPPORTED."""

_MOST_BLOCKS = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)
"""In x, y and z, on every GPU."""


def load(name: str, operation: str) -> Implementation:
    """The implementation that the TOML file ``name`` describes. Runs nothing yet. Raises UsageError."""
    kernel = specification.load(file_path(name))
    if kernel.operation != operation:
        raise UsageError(f"{name} is a kernel for {kernel.operation}; this suite races {operation}")
    prepare = _prepare_cuda if kernel.language is Language.CUDA else _prepare_host
    return Implementation(
        name,
        kernel.description or f"{kernel.entry} of {kernel.source.name}",
        (kernel.device,),
        functools.partial(prepare, kernel),
        operation=operation,
    )


def _prepare_host(kernel: Specification, case: AttentionCase, inputs: AttentionInputs) -> Call:
    import torch

    from cudadent42.correctness.guards import empty_like
    from flashmoe_science.jit import host

    kernel = tuned_for(kernel, case, cpu_name(), 0)
    _require(kernel, case, inputs, None)
    configuration = kernel.find(case.dtype, case.head_dim, None)
    assert configuration is not None
    library = host.load(kernels.build_host(kernel, configuration, case.dtype))
    try:
        function: Any = library[kernel.entry]
    except AttributeError as error:
        raise UsageError(
            f"{kernel.source.name} exports no function {kernel.entry!r}; declare it with CUDADENT42_EXPORT"
        ) from error
    function.argtypes = [ctypes.c_void_p]
    function.restype = ctypes.c_int
    problem = Problem()
    fill(problem, case, inputs, empty_like(inputs.query), torch.get_num_threads())
    address = ctypes.addressof(problem)

    def call() -> Tensor:
        output = empty_like(inputs.query)  # and keeps the inputs, of which the problem has addresses only
        problem.output = output.data_ptr()
        status = function(address)
        if status == _UNSUPPORTED:
            raise UnsupportedCaseError(f"{kernel.name} says that it does not do this case")
        if status != _DONE:
            raise RuntimeError(
                f"{kernel.entry} returned {status}; expected 0, or 1 for a case that it does not do"
            )
        return output

    return call


def _prepare_cuda(kernel: Specification, case: AttentionCase, inputs: AttentionInputs) -> Call:
    import torch

    from cudadent42.correctness.guards import empty_like
    from flashmoe_science.cuda.device import device_of
    from flashmoe_science.cuda.driver import load, make_context_current
    from flashmoe_science.cuda.launch import Launcher

    device = device_of(inputs.query.get_device())
    kernel = tuned_for(kernel, case, device.name, device.multiprocessors)
    _require(kernel, case, inputs, device.architecture)
    configuration = kernel.find(case.dtype, case.head_dim, device.architecture)
    assert configuration is not None
    grid = blocks(configuration.grid, case, device.multiprocessors)
    for axis, count, most in zip("xyz", grid, _MOST_BLOCKS, strict=True):
        if count > most:
            raise UnsupportedCaseError(
                f"{kernel.name} asks for {count} blocks in {axis}; a grid holds {most}"
            )
    compiled = kernels.cuda_kernel(kernel, configuration, case.dtype, case.head_dim, device.architecture)
    make_context_current(device.index)
    function = load(compiled, device.index, torch.cuda.is_current_stream_capturing(), allow_defects=True)
    launcher = Launcher(function, grid, compiled, ctypes.sizeof(Problem))
    problem = Problem.from_buffer(launcher.buffer)
    fill(problem, case, inputs, empty_like(inputs.query), threads=0)
    nothing_to_do = 0 in grid
    start, current_stream = launcher.start, torch.cuda.current_stream

    def call() -> Tensor:
        output = empty_like(inputs.query)
        if not nothing_to_do:
            problem.output = output.data_ptr()
            start(current_stream().cuda_stream)
        return output

    return call


def _require(
    kernel: Specification, case: AttentionCase, inputs: AttentionInputs, architecture: str | None
) -> None:
    """Raises UnsupportedCaseError unless the kernel's file says that it does the case."""
    reason = kernel.why_not(case, architecture)
    if reason is not None:
        raise UnsupportedCaseError(reason)
    from cudadent42.correctness.guards import empty_like

    if any(tensor.stride(3) != 1 for tensor in (*inputs.tensors, empty_like(inputs.query))):
        raise UnsupportedCaseError("the head dim is not contiguous")
