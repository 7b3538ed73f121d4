"""Rotations of queries and keys: the kernel's source run on the CPU, and the kernel on a GPU, against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER, compile_emulation
from rotation_cases import CASES, Case, Tensors, composed, exact

from flashmoe_science import InputError
from flashmoe_science.cuda import rotation
from flashmoe_science.jit.limits import LIMITS
from flashmoe_science.jit.nvrtc import compile_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def emulate(tensors: Tensors, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """In results with a row of NaN behind their last, which stays."""
    query, key, _, _ = tensors
    assert rotation.why_not(*tensors[:2]) is None
    layouts = rotation.results_of(query, key)
    stores = [
        torch.full(
            (layout.sizes[0] * layout.sizes[1] * layout.sizes[2] * layout.sizes[3] + 64,), torch.nan
        ).to(query.dtype)
        for layout in layouts
    ]
    arguments = ctypes.create_string_buffer(rotation.ARGUMENT_BYTES)
    rotation.write_arguments(arguments, tensors, layouts, inverse)
    rotation._ADDRESSES.pack_into(arguments, 0, *(each.data_ptr() for each in (*tensors, *stores)))
    kernel = rotation.kernel(query.dtype, "sm_90")
    blocks = -(-rotation.threads_of(query, key) // rotation.THREADS)
    compile_emulation(kernel, "RotateParameters").run(arguments, blocks)
    assert all(store[-64:].isnan().all() for store in stores)
    rotated = [
        store[:-64].as_strided(layout.sizes, layout.strides)
        for store, layout in zip(stores, layouts, strict=True)
    ]
    return rotated[0], rotated[1]


def assert_no_less_exact(ours: tuple[torch.Tensor, ...], tensors: Tensors, inverse: bool) -> None:
    """Than the library's composition, at worst and on average; turning back, than rounding what is right once."""
    precision = torch.finfo(tensors[0].dtype).eps
    for mine, theirs, right in zip(ours, composed(tensors), exact(tensors, inverse), strict=True):
        error = (mine.double().cpu() - right).abs()
        if inverse:
            scale = right.abs() + (1e-30 if precision > 1e-6 else 2.0)
            assert (error <= precision * scale).all()
        else:
            other = (theirs.double().cpu() - right).abs()
            assert error.max() <= other.max()
            assert error.square().mean() <= other.square().mean()


@NEEDS_COMPILER
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_emulated_kernel(name: str, dtype: torch.dtype, inverse: bool) -> None:
    tensors = CASES[name].make(dtype)
    assert_no_less_exact(emulate(tensors, inverse), tensors, inverse)


@NEEDS_COMPILER
def test_halves_with_tables_of_their_own() -> None:
    """Which no model has; the kernel reads each where it lies."""
    query, key, cosine, sine = CASES["heads of two sequences"].make(torch.float32)
    tensors = query, key, torch.rand(cosine.shape), torch.rand(sine.shape)
    for inverse in (False, True):
        for mine, right in zip(emulate(tensors, inverse), exact(tensors, inverse), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-6, atol=1e-6)


@NEEDS_COMPILER
def test_a_nan_stays_in_its_pair() -> None:
    query, key, cosine, sine = CASES["heads of two sequences"].make(torch.bfloat16)
    query = query.clone()
    query[1, 3, 2, 7] = torch.nan
    rotated, other = emulate((query, key, cosine, sine), False)
    assert rotated.isnan().nonzero().tolist() == [[1, 3, 2, 7], [1, 3, 2, 39]]
    assert not other.isnan().any()


def test_results_lie_as_the_tensors_do() -> None:
    query, key, *_ = CASES["one projection"].make(torch.bfloat16)
    for layout, tensor in zip(rotation.results_of(query, key), (query, key), strict=True):
        assert layout.strides == torch.empty_like(tensor).stride()
        assert sorted(layout.strides)[-1] < tensor.numel()


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (Case(), torch.float64, "another dtype"),
        (Case(head_dim=24), torch.bfloat16, "head_dim no multiple of 16"),
        (Case(head_dim=12), torch.float32, "head_dim no multiple of 8"),
        (Case(tokens=0), torch.float32, "an empty tensor"),
    ],
)
def test_what_it_does_not_take(case: Case, dtype: torch.dtype, reason: str) -> None:
    assert rotation.why_not(*case.make(dtype)[:2]) == reason


def test_rows_that_are_not_aligned() -> None:
    query, key, cosine, _ = CASES["heads of two sequences"].make(torch.bfloat16)
    wide = torch.zeros(*query.shape[:3], 68, dtype=query.dtype)[..., :64]
    assert rotation.why_not(wide, key) == "rows not aligned to 16 bytes"
    assert rotation.why_not(query.mT.contiguous().mT, key) == "rows not contiguous"
    assert rotation.readable(wide).stride(2) == 64
    assert rotation.readable(query) is query
    assert rotation.readable(cosine.mT.contiguous().mT).is_contiguous()
    odd = torch.zeros(65, dtype=query.dtype)[1:]
    assert rotation.readable(odd).data_ptr() % 16 == 0


@each_architecture(tuple(LIMITS))
def test_it_compiles_for_every_architecture(architecture: str, nvrtc: None) -> None:
    for kernel in rotation.kernels(architecture):
        resources = compile_kernel(kernel).resources
        assert resources is not None
        assert resources.spill_store_bytes == resources.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype, inverse: bool) -> None:
    tensors = CASES[name].make(dtype, "cuda")
    for _ in range(2):
        ours = rotation.rotate(*tensors, inverse)
        assert_no_less_exact(ours, tensors, inverse)
    for mine, tensor in zip(ours, tensors, strict=False):
        assert mine.stride() == torch.empty_like(tensor).stride()


@pytest.mark.gpu
def test_a_graph_captures_it_and_the_operator_copies_what_lies_otherwise() -> None:
    from flashmoe_science.operators.rotation import ROTATE

    tensors = CASES["heads of two sequences"].make(torch.bfloat16, "cuda")
    right = rotation.rotate(*tensors, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rotation.rotate(*tensors, False)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, right, strict=True))
    query, key, cosine, sine = tensors
    wide = torch.zeros(*query.shape[:3], 68, dtype=query.dtype, device="cuda")[..., :64]
    with pytest.raises(InputError, match="not aligned"):
        rotation.rotate(wide, key, cosine, sine, False)
    wide.copy_(query)
    assert torch.equal(ROTATE(wide, key, cosine, sine)[0], right[0])
