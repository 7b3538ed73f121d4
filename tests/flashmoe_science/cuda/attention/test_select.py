"""Which kernel a call takes: preference, override, and what no kernel takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.configs.attention.hopper import HopperConfiguration
from flashmoe_science.configs.attention.portable import PortableConfiguration
from flashmoe_science.configs.attention.small import SmallConfiguration
from flashmoe_science.cuda import launch
from flashmoe_science.cuda.attention import (
    OVERRIDE_VARIABLE,
    KernelKind,
    Problem,
    compiled,
    explain,
    hopper,
    portable,
    select,
    small,
)
from flashmoe_science.cuda.attention.select import module, plan
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.errors import DeviceError, InputError, KernelDefectError
from flashmoe_science.jit.limits import LIMITS
from flashmoe_science.jit.nvrtc import CudaKernel
from problems import H200, T4, contiguous


def problem(
    *,
    batch: int = 2,
    heads: tuple[int, int] = (16, 16),
    lengths: tuple[int, int] = (2048, 2048),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    causal: bool = False,
    scale: float | None = None,
) -> Problem:
    """A call on contiguous tensors."""
    return contiguous(batch, *heads, *lengths, head_dim, causal, dtype, scale=scale)


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE_VARIABLE, raising=False)


def test_long_calls_take_the_kernel_of_the_architecture() -> None:
    assert select(problem(), H200).kernel is KernelKind.HOPPER
    older = dataclasses.replace(H200, nvrtc=(12, 8))
    assert select(problem(), older).kernel is KernelKind.PORTABLE
    for architecture in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"):
        device = dataclasses.replace(H200, architecture=architecture)
        assert select(problem(), device).kernel is KernelKind.PORTABLE
    assert select(problem(), T4).kernel is KernelKind.PORTABLE


def test_what_hopper_cannot_do_goes_to_the_portable_kernel() -> None:
    shared = dataclasses.replace(problem(), key_strides=(0, 0, 64))
    for call in (shared, problem(scale=-0.1)):
        assert select(call, H200).kernel is KernelKind.PORTABLE


@pytest.mark.parametrize("kind", KernelKind)
def test_the_environment_names_the_kernel(monkeypatch: pytest.MonkeyPatch, kind: KernelKind) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, kind.value)
    call = problem(batch=1, heads=(2, 2), lengths=(128, 128))  # each of them takes it
    assert select(call, H200).kernel is kind


def test_an_empty_override_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "")
    assert select(problem(), H200).kernel is KernelKind.HOPPER


def test_a_kernel_of_no_such_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "hoper")
    with pytest.raises(
        InputError, match=rf"{OVERRIDE_VARIABLE}='hoper' names no kernel; expected one of"
    ) as caught:
        select(problem(), H200)
    for kind in KernelKind:
        assert kind.value in str(caught.value)


def test_a_named_kernel_that_cannot_take_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "hopper")
    with pytest.raises(InputError, match=r"'hopper'.* cannot take .*head_dim 64 on sm_75; unset it"):
        select(problem(), T4)


def test_what_no_kernel_takes() -> None:
    with pytest.raises(DeviceError, match=r"no CUDA kernel takes torch.bfloat16 .*sm_75; use float16"):
        select(problem(dtype=torch.bfloat16), T4)


class _Compiler:
    """In place of `load`: a compiler that spills registers of some kernels. What passes it has no GPU to run on."""

    class LoadedError(Exception):
        """The kernel's function name, and whether defects were allowed."""

    def __init__(self, *spilled: str) -> None:
        self._spilled = spilled

    def __call__(
        self, kernel: CudaKernel, device: int, capturing: bool, *, allow_defects: bool = False
    ) -> None:
        if kernel.function in self._spilled and not allow_defects:
            raise KernelDefectError(f"{kernel.label} spills 8 bytes")
        raise self.LoadedError(kernel.function, allow_defects)


def _use(compiler: _Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "load", compiler)


def test_a_kernel_with_defects_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(_Compiler("attention_hopper"), monkeypatch)
    with (
        pytest.warns(RuntimeWarning, match=r"attention_hopper\[.* spills 8 bytes") as warned,
        pytest.raises(_Compiler.LoadedError, match=r"'attention_portable', False"),
    ):
        plan(problem(), H200)
    assert len(warned) == 1


def test_where_all_have_defects_the_portable_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(_Compiler("attention_small", "attention_hopper", "attention_portable"), monkeypatch)
    with (
        pytest.warns(RuntimeWarning, match="attention_portable"),
        pytest.raises(_Compiler.LoadedError, match=r"'attention_portable', True"),
    ):
        plan(problem(batch=1, heads=(2, 2), lengths=(128, 128)), H200)


def test_a_kernel_that_was_asked_for_may_not_have_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(_Compiler("attention_hopper"), monkeypatch)
    with pytest.raises(KernelDefectError):
        plan(problem(), H200, select(problem(), H200))
    monkeypatch.setenv(OVERRIDE_VARIABLE, "hopper")
    with pytest.raises(KernelDefectError):
        plan(problem(), H200)


@pytest.mark.usefixtures("nvrtc")  # what is built for sm_90 depends on it
@given(
    batch=st.integers(1, 64),
    heads=st.sampled_from([(1, 1), (8, 8), (32, 8), (16, 1)]),
    lengths=st.tuples(st.integers(1, 1 << 17), st.integers(0, 1 << 17)),
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    causal=st.booleans(),
    architecture=st.sampled_from(sorted(LIMITS)),
)
def test_every_call_has_a_kernel_that_is_built_ahead(
    batch: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    head_dim: int,
    causal: bool,
    architecture: str,
) -> None:
    device = Device(index=0, architecture=architecture, multiprocessors=100, l2_bytes=40 << 20)
    call = problem(batch=batch, heads=heads, lengths=lengths, head_dim=head_dim, causal=causal)
    choice = select(call, device)
    assert choice.reason
    assert choice.configuration.head_dim >= head_dim
    assert kernel_of(choice, call.dtype, architecture) in module(choice.kernel).kernels(architecture)


def kernel_of(choice: Choice, dtype: torch.dtype, architecture: str) -> CudaKernel:
    configuration = choice.configuration
    if isinstance(configuration, HopperConfiguration):
        return hopper.kernel(configuration, dtype)
    if isinstance(configuration, SmallConfiguration):
        return small.kernel(configuration, dtype, architecture)
    assert isinstance(configuration, PortableConfiguration)
    return portable.kernel(configuration, dtype, architecture)


# ---------------------------------------------------------------- for a GPU that is not here


@pytest.mark.usefixtures("nvrtc")  # what is built for sm_90 depends on it
@pytest.mark.parametrize(
    ("device", "shape", "kind"),
    [
        (H200, (2, 16, 2048, 64), KernelKind.HOPPER),
        (H200, (8, 32, 1, 128), KernelKind.SMALL),
        (T4, (2, 16, 2048, 64), KernelKind.PORTABLE),
    ],
)
def test_what_is_compiled_for_a_gpu_that_is_not_here(
    device: Device, shape: tuple[int, int, int, int], kind: KernelKind
) -> None:
    batch, heads, rows, head_dim = shape
    query = torch.empty(batch, heads, rows, head_dim, dtype=torch.float16, device="meta")
    keys = torch.empty(batch, heads, 2048, head_dim, dtype=torch.float16, device="meta")
    choice = explain(query, keys, keys, device=device)
    assert choice.kernel is kind
    kernel = compiled(choice, torch.float16, device.architecture)
    assert kernel in module(kind).kernels(device.architecture)
