"""The Hopper path without a GPU: what is chosen, what fits, what is refused."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from compiled_for import each_architecture
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science.configs.moe import hopper as configs
from flashmoe_science.cuda import wgmma
from flashmoe_science.cuda.moe import MoeKind, MoeProblem, combine, hopper, routing, select
from flashmoe_science.cuda.moe.select import OVERRIDE_VARIABLE, kernels
from flashmoe_science.errors import InputError, NoKernelError
from flashmoe_science.jit.limits import check_block
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.moe_arguments import Activation, W13Layout
from problems import H200

PROBLEM = MoeProblem(
    tokens=4096,
    hidden=2048,
    intermediate=768,
    experts=128,
    top_k=8,
    dtype=torch.bfloat16,
    activation=Activation.SILU,
    w13_layout=W13Layout.CONCAT,
    ids64=False,
)


def test_takes_many_tokens() -> None:
    choice = hopper.choose(PROBLEM, H200)
    assert choice is not None
    assert choice.kernel is MoeKind.HOPPER
    assert choice.configuration == configs.WIDE
    assert hopper.choose(replace(PROBLEM, tokens=64), H200).configuration == configs.NARROW


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({"tokens": 8192}, configs.PAIRS),
        ({"tokens": 8191}, configs.WIDE),
        ({"tokens": 8192, "experts": 129}, configs.WIDE),
        ({"tokens": 8192, "experts": 8, "top_k": 2, "intermediate": 14336}, configs.PAIRS),
        ({"tokens": 8192, "keeps": False}, configs.WIDE),
        ({"tokens": 8192, "activation": Activation.RELU2_NO_MUL}, configs.WIDE),
        ({"tokens": 64}, configs.NARROW),
    ],
)
def test_pairs_of_blocks_where_they_were_raced_and_won(
    change: dict[str, object], tile: configs.MoeHopperConfiguration
) -> None:
    """Gated layers that keep what the backward pass needs, 512 slots an expert or more in the mean."""
    choice = hopper.choose(replace(PROBLEM, **{"keeps": True, **change}), H200)  # type: ignore[arg-type]
    assert choice is not None
    assert choice.configuration == tile
    assert ("pairs of blocks share weights" in choice.reason) == (tile == configs.PAIRS)


@pytest.mark.parametrize(
    "change",
    [{"architecture": "sm_80"}, {"architecture": "sm_100"}, {"nvrtc": (12, 8)}],
)
def test_leaves_other_machines(change: dict[str, object]) -> None:
    assert hopper.choose(PROBLEM, replace(H200, **change)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 1 << 20}, "experts; expected at most 32768"),
        ({"tokens": 1 << 27, "hidden": 1 << 15}, "tiles; expected at most .*: split the tokens"),
    ],
)
def test_what_cannot_be_counted(change: dict[str, object], message: str) -> None:
    big = replace(PROBLEM, **change)  # type: ignore[arg-type]
    assert hopper.choose(big, H200) is None
    with pytest.raises(InputError, match=message):
        hopper.check(big, configs.WIDE)


def test_other_configurations_are_refused() -> None:
    with pytest.raises(InputError, match="take a MoeHopperConfiguration, not 3"):
        hopper.check(PROBLEM, 3)


def test_the_variable_names_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "hopper")
    assert select(PROBLEM, H200).kernel is MoeKind.HOPPER
    with pytest.raises(InputError, match="the kernel 'hopper' that FLASHMOE_MOE_KERNEL asks for cannot take"):
        select(PROBLEM, replace(H200, architecture="sm_80"))
    monkeypatch.setenv(OVERRIDE_VARIABLE, "nothing")
    with pytest.raises(InputError, match=r"'nothing' names no kernel; expected one of .*hopper"):
        select(PROBLEM, H200)


def test_no_way() -> None:
    with pytest.raises(NoKernelError, match="no mixture-of-experts kernel takes"):
        select(PROBLEM, replace(H200, architecture="sm_75"))


@given(
    tokens=st.integers(1, 1 << 20),
    experts=st.integers(1, 4096),
    activation=st.sampled_from(Activation),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_every_choice_is_built_ahead_and_fits(
    tokens: int, experts: int, activation: Activation, dtype: torch.dtype
) -> None:
    problem = replace(PROBLEM, tokens=tokens, experts=experts, top_k=1, activation=activation, dtype=dtype)
    choice = hopper.choose(problem, H200)
    assert choice is not None
    hopper.check(problem, choice.configuration)
    built = _built()
    for part in (activation, None):
        kernel = hopper.kernel(choice.configuration, part, dtype)
        assert kernel.label in built
        check_block(kernel.label, "sm_90", kernel.threads_per_block, kernel.dynamic_shared_bytes)


@functools.cache
def _built() -> set[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wgmma, "nvrtc_version", lambda: (13, 0))  # whether or not one is installed here
        return {kernel.label for kernel in kernels("sm_90a")}


@given(experts=st.integers(1, 8192), architecture=st.sampled_from(["sm_75", "sm_80", "sm_86", "sm_90a"]))
def test_routing_has_room_for_every_expert(experts: int, architecture: str) -> None:
    capacity = routing.capacity_for(experts)
    assert experts <= capacity <= routing.most_experts(architecture)
    for function in ("moe_count", "moe_place"):
        kernel = routing.kernel(function, capacity, 2048, False, architecture)
        check_block(kernel.label, architecture, kernel.threads_per_block, kernel.dynamic_shared_bytes + 9000)


@pytest.mark.usefixtures("nvrtc")
@each_architecture(["sm_75", "sm_80", "sm_90a"], quick="sm_90a")
def test_routing_and_combination_compile(architecture: str) -> None:
    for kernel in (*routing.step_kernels(architecture), *combine.step_kernels(architecture)):
        compile_kernel(kernel)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("activation", [Activation.SILU, pytest.param(None, marks=pytest.mark.slow)])
def test_a_product_compiles(activation: Activation | None) -> None:
    """Spills and serialised wgmma raise."""
    compile_kernel(hopper.kernel(configs.WIDE, activation, torch.bfloat16))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("activation", [None, pytest.param(Activation.SILU, marks=pytest.mark.slow)])
def test_a_product_of_pairs_compiles(activation: Activation | None) -> None:
    """Spills and serialised wgmma raise."""
    compile_kernel(hopper.kernel(configs.PAIRS, activation, torch.bfloat16, keeps=True))
