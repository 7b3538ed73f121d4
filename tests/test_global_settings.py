"""What the packages compute follows no global setting of torch: default dtypes and devices, modes, and every setter.

Model loaders, notebooks and other libraries leave such settings behind. The setters are looked for in torch itself, so
that one which a later torch adds fails `test_every_setter_is_tried` until it is here.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import deterministic

import bare_torch
from cudadent42 import operations
from cudadent42.correctness.guards import damage, empty_like, guarded, guarding_outputs
from cudadent42.model.records import CacheState, Plan
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention_backward.case import AttentionBackwardCase
from cudadent42.operations.moe.case import MoeCase
from cudadent42.timing.flush import flush_for
from flashmoe_science import autocast, explain, flash_attention, fused_moe, topk_routing
from torch_settings import STATES, State, autocasting, default_device, records, same_bits

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
        differentiated = [gradients(each) for each in given] if records() else [each[1] for each in plain]
        mixed_here, words_here = mix(experts), str(explain(flash_attention, *given[0].tensors))
    for (out, gradient), out_here, gradient_here in zip(plain, attended, differentiated, strict=True):
        assert same_bits(out, out_here)
        assert same_bits(gradient, gradient_here)
    assert same_bits(mixed, mixed_here)
    assert words == words_here


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in STATES if any(word in name for word in ON_GPU)])
def test_settings_on_a_gpu(name: str) -> None:
    state = STATES[name]
    if "autocast(cpu" in name:
        state = autocasting("cuda", torch.float16)
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
        if not records() and case.operation == "attention_backward":
            pytest.skip("PyTorch's own gradients need autograd")
        here = of_the_lab(case)
    if any(word in name for word in INEXACT):
        for one, other in zip(plain, here, strict=True):
            assert (one.dtype, one.device) == (other.dtype, other.device)
            if not same_bits([one], [other]):  # most are, which is seen in a third of the time
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
    done = bare_torch.run(program)
    assert done.returncode == 0, done.stderr
