"""What the packages compute follows no global setting of torch: default dtypes and devices, modes, and every setter.

Model loaders, notebooks and other libraries leave such settings behind. The setters are looked for in torch itself, so
that one which a later torch adds fails `test_every_setter_is_tried` until it is here.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import deterministic

from cudadent42 import operations
from cudadent42.correctness.guards import damage, empty_like, guarded, guarding_outputs
from cudadent42.model.records import CacheState, Plan
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention_backward.case import AttentionBackwardCase
from cudadent42.operations.moe.case import MoeCase
from cudadent42.timing.flush import flush_for
from flashmoe_science import autocast, explain, flash_attention, fused_moe, topk_routing

State = Callable[[], AbstractContextManager[object]]
Settings = dict[str, State]


@contextmanager
def swapped(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def by(put: Callable[[Any], object], get: Callable[[], Any], *values: Any) -> Settings:
    """A state for each value of a setter that has a getter."""
    short = put.__name__
    name = f"torch.{short}" if getattr(torch, short, None) is put else f"{put.__module__}.{short}"
    return {f"{name}({value})": lambda value=value: swapped(get, put, value) for value in values}


def attribute(owner: Any, name: str, *values: Any) -> Settings:
    """The same for a property of one of torch's modules, where this torch has it."""
    if not hasattr(owner, name):
        return {}
    where = getattr(owner, "__name__", type(owner).__name__)

    def state(value: Any) -> State:
        return lambda: swapped(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)

    return {f"{where}.{name}={value}": state(value) for value in values}


@contextmanager
def default_tensor_type(name: str) -> Iterator[None]:
    torch.set_default_tensor_type(name)
    try:
        yield
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def strictly_deterministic() -> Iterator[None]:
    """Every operation that is not deterministic is an error, and new memory is full of NaN."""
    with swapped(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "error"):
        before = deterministic.fill_uninitialized_memory
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            deterministic.fill_uninitialized_memory = before


@contextmanager
def printing() -> Iterator[None]:
    torch.set_printoptions(precision=1, threshold=1, edgeitems=1, linewidth=20, sci_mode=True)
    try:
        yield
    finally:
        torch.set_printoptions(profile="default")


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _autocast(device: str, dtype: torch.dtype) -> State:
    return lambda: torch.autocast(device, dtype)


STATES: Settings = {
    **by(torch.set_default_dtype, torch.get_default_dtype, torch.float64, torch.bfloat16, torch.float16),
    "torch.set_default_tensor_type": lambda: default_tensor_type("torch.DoubleTensor"),
    "torch.set_default_device(meta)": lambda: default_device("meta"),
    "torch.set_default_device(cuda)": lambda: default_device("cuda"),
    "with torch.device(meta)": lambda: torch.device("meta"),
    "torch.no_grad": torch.no_grad,
    "torch.inference_mode": torch.inference_mode,
    "torch.autocast(cpu, bfloat16)": _autocast("cpu", torch.bfloat16),
    "torch.autocast(cpu, float16)": _autocast("cpu", torch.float16),
    **by(torch.set_anomaly_enabled, torch.is_anomaly_enabled, True),
    **by(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled, False),
    **by(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode, "warn", "error"),
    "torch.use_deterministic_algorithms, fill_uninitialized_memory": strictly_deterministic,
    **by(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "high", "medium"),
    "torch.set_flush_denormal": flushing,
    **by(torch.set_grad_enabled, torch.is_grad_enabled, False),
    **by(torch.set_num_threads, torch.get_num_threads, 1, 3),
    "torch.set_printoptions": printing,
    **by(torch.set_rng_state, torch.get_rng_state, torch.Generator().manual_seed(3).get_state()),
    **by(torch.set_warn_always, torch.is_warn_always_enabled, True),
    **by(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled, False),
    **attribute(torch.backends.mkldnn, "enabled", False),
    **attribute(torch.backends.mkldnn, "deterministic", True),
    **attribute(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    **attribute(torch.backends.opt_einsum, "enabled", False),
    **attribute(torch.backends.cudnn, "enabled", False),
    **attribute(torch.backends.cudnn, "deterministic", True),
    **attribute(torch.backends.cudnn, "benchmark", True),
    **attribute(torch.backends.cudnn, "allow_tf32", False),
    **attribute(torch.backends.cuda.matmul, "allow_tf32", True),
    **attribute(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    **attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    **attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
}
"""What a process may have set before it calls. `torch.autocast` stands for the setters that are its parts."""

ELSEWHERE = {
    "set_num_interop_threads": "once a process: test_interop_threads",
    # torch.autocast sets and takes them back, together and in order.
    **dict.fromkeys(
        ("set_autocast_dtype", "set_autocast_enabled", "set_autocast_cpu_dtype", "set_autocast_cpu_enabled"),
        "torch.autocast",
    ),
    **dict.fromkeys(
        (
            *("set_autocast_gpu_dtype", "set_autocast_ipu_dtype", "set_autocast_ipu_enabled"),
            *("set_autocast_xla_dtype", "set_autocast_xla_enabled"),
        ),
        "of devices that no kernel here is for, but CUDA: test_settings_on_a_gpu",
    ),
}
"""Setters of torch that no state sets by their names, and where they are tried."""

ON_GPU = (
    "dtype",
    "device",
    "autocast",
    "deterministic",
    "precision",
    "cuda.matmul",
    "grad",
    "inference_mode",
)


def setters(module: types.ModuleType) -> set[str]:
    return {
        name for name in vars(module) if name.startswith(("set_", "use_")) and callable(getattr(module, name))
    }


def tried(prefix: str) -> set[str]:
    names = (name.replace(",", "(").split("(")[0] for name in STATES)
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_every_setter_is_tried() -> None:
    assert setters(torch) - tried("torch.") - set(ELSEWHERE) == set()
    assert {name for name in vars(deterministic._Deterministic) if name[0] != "_"} == {
        "fill_uninitialized_memory"
    }
    expected_setters = {
        # A form of flags as a context manager; that of nnpack concerns convolutions.
        "set_flags",
        "set_fastpath_enabled",
    }
    for name, module in vars(torch.backends).items():
        if isinstance(module, types.ModuleType):
            assert setters(module) - expected_setters == set(), name


@dataclass(frozen=True)
class Attention:
    tensors: tuple[torch.Tensor, ...]
    gradient: torch.Tensor


def _attention(dtype: torch.dtype, device: str) -> Attention:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(2, 4, 37, 64, generator=generator).to(device, dtype) for _ in range(4)]
    return Attention(tuple(made[:3]), made[3])


def attend(given: Attention) -> list[torch.Tensor]:
    return list(flash_attention(*given.tensors, causal=True, return_lse=True))


def gradients(given: Attention) -> list[torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in given.tensors]
    out, lse = flash_attention(*leaves, causal=True, return_lse=True)
    return list(torch.autograd.grad((out, lse), leaves, (given.gradient.to(out.dtype), torch.ones_like(lse))))


def _experts(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"hidden_states": (6, 64), "w13": (4, 128, 64), "w2": (4, 64, 64), "logits": (6, 4)}
    return {
        name: torch.randn(*shape, generator=generator).to(
            device, torch.float32 if name == "logits" else dtype
        )
        for name, shape in shapes.items()
    }


def _weights(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return given["hidden_states"], given["w13"], given["w2"]


def mix(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    weights, ids = topk_routing(given["logits"], 2)
    return [weights, ids, fused_moe(given["hidden_states"], given["w13"], given["w2"], weights, ids)]


CASES = (
    AttentionCase("a", "bf16", 1, 2, 1, 17, 19, 32, causal=True),
    AttentionBackwardCase("b", "fp32", 1, 2, 1, 17, 19, 32, causal=True),
    MoeCase("m", "bf16", 6, 32, 32, 4, 2),
)


def of_the_lab(case: Any) -> list[torch.Tensor]:
    """What the lab allocates for one case: inputs, hard ones, bands around them, references."""
    numerics = operations.numerics(case)
    inputs = numerics.input_sets(case, 7, 1, "cpu")[0]
    made = [*inputs.tensors]
    for hard in (*numerics.hard_inputs(case.dtype), *numerics.hard_cases([case], "cpu")):
        made += hard.make(5, "cpu").tensors
    with guarding_outputs() as around:
        copies, guards = guarded([inputs])
        empty_like(inputs.result_like)
    assert damage([*guards, *around]) == ""
    made += copies[0].tensors
    exact = numerics.float64(case, inputs, lambda: None)
    made += [exact] if isinstance(exact, torch.Tensor) else [exact.value, exact.limit]
    return made


@functools.cache
def _plainly(case: Any) -> list[torch.Tensor]:
    return of_the_lab(case)


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype
        and a.device == b.device
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", STATES)
def test_settings(name: str) -> None:
    _check(STATES[name], "cpu", (torch.float32, torch.bfloat16))


def _check(state: State, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    given = [_attention(dtype, device) for dtype in dtypes]
    experts = _experts(device, dtypes[-1])
    with state():  # Under autocast a call is that of cast tensors, and gradients are cast back.
        used = [Attention(autocast.cast(*each.tensors), each.gradient) for each in given]
        of_experts = dict(zip(("hidden_states", "w13", "w2"), autocast.cast(*_weights(experts)), strict=True))
    plain = [
        (
            attend(each),
            [gradient.to(own.dtype) for gradient, own in zip(gradients(each), of.tensors, strict=True)],
        )
        for each, of in zip(used, given, strict=True)
    ]
    mixed, words = mix({**experts, **of_experts}), str(explain(flash_attention, *given[0].tensors))
    with state():
        attended = [attend(each) for each in given]
        differentiated = [gradients(each) for each in given] if _records() else [each[1] for each in plain]
        mixed_here, words_here = mix(experts), str(explain(flash_attention, *given[0].tensors))
    for (out, gradient), out_here, gradient_here in zip(plain, attended, differentiated, strict=True):
        assert same_bits(out, out_here)
        assert same_bits(gradient, gradient_here)
    assert same_bits(mixed, mixed_here)
    assert words == words_here


def _records() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in STATES if any(word in name for word in ON_GPU)])
def test_settings_on_a_gpu(name: str) -> None:
    state = STATES[name]
    if "autocast(cpu" in name:
        state = _autocast("cuda", torch.float16)
    _check(state, "cuda", (torch.float16, torch.bfloat16))


INEXACT = (
    "set_float32_matmul_precision",
    "fp32_precision",
    "allow_tf32",
    "set_num_threads",
    "mkldnn",
    "autocast",
)
"""Settings by which PyTorch itself may sum in another order: the lab's references are PyTorch's operations in float64,
which do not follow them but for the number of threads."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.operation)
@pytest.mark.parametrize("name", STATES)
def test_what_the_lab_allocates(name: str, case: Any) -> None:
    plain = _plainly(case)
    with STATES[name]():
        if not _records() and case.operation == "attention_backward":
            pytest.skip("PyTorch's own gradients need autograd")
        here = of_the_lab(case)
    if any(word in name for word in INEXACT):
        for one, other in zip(plain, here, strict=True):
            assert (one.dtype, one.device) == (other.dtype, other.device)
            torch.testing.assert_close(one, other, equal_nan=True)
    else:
        assert same_bits(plain, here)


def test_the_cold_cache_buffer() -> None:
    plan = Plan("unit", "cpu", CASES[:1], "sdpa", ("cudadent42",), 1, 0, 0, cache=CacheState.COLD)
    with default_device("meta"):
        flush = flush_for(plan)
    assert flush is not None
    flush()


def test_interop_threads() -> None:
    """Once a process, before anything else has run in parallel."""
    program = (
        "import torch; torch.set_num_interop_threads(3)\n"
        "import flashmoe_science as f\n"
        "x = torch.ones(1, 2, 9, 32, dtype=torch.float32, device='cpu')\n"
        "assert torch.equal(f.flash_attention(x, x, x), x)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
