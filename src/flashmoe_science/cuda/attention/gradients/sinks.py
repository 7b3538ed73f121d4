"""What sinks change of attention's backward pass, and their own gradient (`kernels/cuda/attention_backward_sinks.cu`):
one launch, before that of a backward kernel.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from flashmoe_science.configs.attention.small import MOST_ARRIVALS
from flashmoe_science.cuda.attention.gradients.problem import is_readable
from flashmoe_science.cuda.attention.problem import Strides, strides_of
from flashmoe_science.cuda.calls import Calls, Options, Tensors
from flashmoe_science.cuda.device import Device, device_of, element_types
from flashmoe_science.cuda.driver import make_context_current
from flashmoe_science.cuda.launch import LaunchPlan, loaded
from flashmoe_science.cuda.repeat import Call, Layout, cuda_allocator, prepare
from flashmoe_science.cuda.tickets import arrival_pool
from flashmoe_science.jit.limits import overlaps
from flashmoe_science.jit.nvrtc import CudaKernel

THREADS = 128
"""Of a block, and rows."""
_DTYPES = (torch.float16, torch.bfloat16)
_CHUNK = 8  # elements of 16 bytes
_RESULTS = 3
_PARTIAL_BYTES = 16  # that a block leaves
_MOST_HEADS = MOST_ARRIVALS
_MOST_BLOCKS = 1 << 31
# lse, sinks, output, grad_output, grad_lse; total, scaled_grad_lse, grad_sinks; partials, arrivals
_ADDRESSES = struct.Struct("10Q")
_REST = struct.Struct("9q 6i")
_ARGUMENT_BYTES = _ADDRESSES.size + _REST.size


@dataclass(frozen=True)
class SinksProblem:
    """One call: shapes, layout, and what is wanted."""

    batch: int
    num_heads: int
    seqlen_q: int
    head_dim: int
    dtype: torch.dtype
    """Of output and grad_output."""
    output_strides: Strides | None
    """None, as the next: the sinks' gradient is not wanted."""
    grad_output_strides: Strides | None
    grad_lse_strides: Strides | None
    """None: the log-sum-exp has no gradient, or nobody wants its counterpart."""

    @property
    def row_blocks(self) -> int:
        return -(-self.seqlen_q // THREADS)

    @property
    def blocks(self) -> int:
        return self.batch * self.num_heads * self.row_blocks


def with_sinks(
    grad_output: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    grad_lse: torch.Tensor | None,
    *,
    total: bool,
    of_sinks: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """What the backward kernels get in the place of ``lse`` and ``grad_lse``, and the sinks' gradient, on PyTorch's
    current stream. Sums have a fixed order, and nothing is synchronised. Can be captured in a CUDA graph after one call
    with the same combination of shapes, strides and options.

    Args:
        grad_output, output: (batch, heads, seqlen_q, head_dim), `readable`; not read if ``of_sinks`` is not set.
        lse: (batch, heads, seqlen_q) float32, contiguous.
        sinks: (heads,) float32, contiguous.
        grad_lse: like lse, of any strides; not read if ``total`` is not set.
        total: whether the first two are wanted.
        of_sinks: whether the third is.

    Returns:
        None for what is not wanted.

    Raises:
        InputError: memory that does not begin where it has to.
        DeviceError, BuildError: see `flashmoe_science.cuda.driver.load`.
    """
    scaled = grad_lse if total else None
    tensors = (
        *(lse, sinks),
        *((output, grad_output) if of_sinks else ()),
        *(() if scaled is None else (scaled,)),
    )
    results = _calls(tensors, (output.shape[3], output.dtype, total, of_sinks, scaled is not None))
    return results[0], results[1], results[2]


def takes(output: torch.Tensor) -> bool:
    """Whether a call with such an output has the kernel."""
    return output.is_cuda and why_not(output) is None


def why_not(output: torch.Tensor) -> str | None:
    """Why the kernel does not take a call with such an output on a GPU; None if it does."""
    batch, heads, seqlen_q, _ = output.shape
    if output.dtype not in _DTYPES:
        return "another dtype"
    if output.numel() == 0:
        return "an empty tensor"
    if heads > _MOST_HEADS:
        return f"more than {_MOST_HEADS} heads"
    if max(batch * heads * -(-seqlen_q // THREADS), seqlen_q + THREADS) >= _MOST_BLOCKS:
        return "too many rows"
    return None


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if a kernel cannot read its rows where they lie."""
    if is_readable(tensor) and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def kernel(dtype: torch.dtype, architecture: str) -> CudaKernel:
    return CudaKernel(
        source="attention_backward_sinks.cu",
        function="attention_backward_sinks",
        architecture=architecture,
        macros={
            "ELEMENT_BF16": int(dtype == torch.bfloat16),
            "MMA_K": 8 if architecture == "sm_75" else 16,
            "DEPENDENT": int(overlaps(architecture)),
        },
        threads_per_block=THREADS,
        dynamic_shared_bytes=0,
    )


def kernels(architecture: str) -> list[CudaKernel]:
    """See `cuda.choice.KernelModule`."""
    return [kernel(dtype, architecture) for dtype in element_types(architecture)]


def plan(problem: SinksProblem, device: Device) -> LaunchPlan:
    """Launches from the addresses of lse, sinks, output, grad_output and grad_lse, of these the ones that are read; of
    total, its gradient's counterpart and the sinks' gradient, 0 for one that is not wanted; and of the workspace if the
    last is.
    """
    compiled = kernel(problem.dtype, device.architecture)
    dependent = bool(compiled.macros["DEPENDENT"])
    launcher = loaded(compiled, device, (problem.blocks, 1, 1), _ARGUMENT_BYTES, dependent=dependent)
    of_sinks = problem.output_strides is not None
    element, chunks = problem.dtype.itemsize, problem.head_dim // _CHUNK
    absent = 0, 0, 0
    _REST.pack_into(
        launcher.buffer,
        _ADDRESSES.size,
        *(stride * element for stride in problem.output_strides or absent),
        *(stride * element for stride in problem.grad_output_strides or absent),
        *(problem.grad_lse_strides or absent),
        problem.batch,
        problem.num_heads,
        problem.seqlen_q,
        problem.row_blocks,
        chunks,
        1 << (chunks - 1).bit_length(),
    )
    read = True, True, of_sinks, of_sinks, problem.grad_lse_strides is not None
    pool = arrival_pool(device.index) if of_sinks else None
    if pool is not None and not torch.cuda.is_current_stream_capturing():
        pool.reserve()
    buffer, start, pack, heads = launcher.buffer, launcher.start, _ADDRESSES.pack_into, problem.num_heads

    def launch(*given: int) -> None:
        *addresses, stream = given
        left = iter(addresses)
        inputs = [next(left) if each else 0 for each in read]
        results = [next(left) for _ in range(_RESULTS)]
        partials = next(left, 0)
        arrivals = 0 if pool is None else pool.take(stream, heads)
        pack(buffer, 0, *inputs, *results, partials, arrivals)
        start(stream)

    return LaunchPlan(launch, problem.blocks * _PARTIAL_BYTES if of_sinks else 0)


def _check(tensors: Tensors, options: Options) -> None:
    """The operator did."""


def _make_call(tensors: Tensors, options: Options, index: int) -> Call:
    lse, _, *rest = tensors
    head_dim, dtype, total, of_sinks, of_lse = options
    output, grad_output = rest[:2] if of_sinks else (None, None)
    batch, heads, seqlen_q = lse.shape
    grad_lse_strides: Strides | None = None
    if of_lse:
        of_batch, of_head, of_row = rest[-1].stride()
        grad_lse_strides = of_batch, of_head, of_row
    make_context_current(index)
    problem = SinksProblem(
        batch=batch,
        num_heads=heads,
        seqlen_q=seqlen_q,
        head_dim=head_dim,
        dtype=dtype,
        output_strides=None if output is None else strides_of("output", output),
        grad_output_strides=None if grad_output is None else strides_of("grad_output", grad_output),
        grad_lse_strides=grad_lse_strides,
    )
    per_row = Layout((batch, heads, seqlen_q), (heads * seqlen_q, seqlen_q, 1), torch.float32)
    results = [
        per_row if total else None,
        per_row if of_lse else None,
        Layout((heads,), (1,), torch.float32) if of_sinks else None,
    ]
    inputs = {"lse": 4, "sinks": 4}
    if of_sinks:
        inputs |= {"output": 16, "grad_output": 16}
    if of_lse:
        inputs["grad_lse"] = 4
    return prepare(inputs, results, plan(problem, device_of(index)), index, cuda_allocator())


_calls = Calls(_check, _make_call, options=5, under_no_grad=True)
"""Options: head_dim, dtype of the output, whether total is wanted, the sinks' gradient, the former's counterpart."""
