"""Building ahead: every configuration of every kernel compiles for every architecture, without a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from cudadent42.operations.cuda_kernels import build, kernels
from flashmoe_science.cuda import device, wgmma
from flashmoe_science.cuda.attention import KernelKind
from flashmoe_science.cuda.attention.select import module
from flashmoe_science.errors import DeviceError
from flashmoe_science.jit.cache import CompileCache

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_everything_compiles(architecture: str) -> None:
    """Spills, a stack frame and serialised wgmma raise. Into the common cache: `cudadent42 build` finds it there."""
    built = build([architecture])
    assert len(built) == len(kernels([architecture]))
    for kernel_build in built:
        assert kernel_build.resources is not None
        assert kernel_build.resources.spill_store_bytes == kernel_build.resources.spill_load_bytes == 0
        assert kernel_build.resources.stack_bytes == 0
        assert kernel_build.resources.blocks_per_sm >= 1
        assert "C75" not in kernel_build.log


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_is_listed_twice(architecture: str) -> None:
    listed = Counter((kernel.architecture, kernel.label) for kernel in kernels([architecture]))
    assert max(listed.values()) == 1


@pytest.mark.usefixtures("nvrtc")
def test_which_kernels_an_architecture_gets() -> None:
    turing = {kernel.function for kernel in kernels(["sm_75"])}
    backward = {f"attention_backward_{step}" for step in ("statistics", "query", "key_value")}
    assert turing == {
        "attention_portable",
        "attention_small",
        "attention_decode",
        "topk_routing",
        "rotate",
    } | backward | {"paged_append"}
    functions = {kernel.function for kernel in kernels(["sm_80"])}
    few = {"moe_few_split", "moe_few_tiles", "moe_few_combined"}
    moe = {"moe_portable", "moe_count", "moe_place", "moe_combine"}
    losses = {"topk_routing_backward", "routing_losses"}
    experts = {
        f"moe_backward_{step}" for step in ("portable", "portable_weights", "routing", "bias", "bias_routing")
    }
    assert functions == turing | few | moe | losses | experts | {"attention_varlen"}
    hopper = {"attention_hopper", "attention_hopper_varlen", "moe_hopper"}
    hopper |= {
        f"attention_backward_{step}"
        for step in ("prepare", "hopper", "convert", "two_pass_query", "two_pass_key_value")
    }
    hopper |= {f"moe_backward_{step}" for step in ("weights", "hopper")}
    assert {kernel.function for kernel in kernels(["sm_90"])} == functions | hopper
    assert kernels(["sm_90"]) == kernels(["sm_90a"])
    assert len(kernels(["sm_80", "sm_86", "sm_80"])) == len(kernels(["sm_80"])) + len(kernels(["sm_86"]))
    assert all(module(kind).kernels("sm_90") for kind in KernelKind)


@pytest.mark.usefixtures("nvrtc")
def test_an_architecture_that_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="unknown GPU architecture 'sm_61'"):
        build(["sm_61"], CompileCache(tmp_path / "cache"))


def test_an_older_compiler_builds_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One module asks for the version; whether or not a compiler is installed here."""
    asking = [
        module
        for name, module in [*sys.modules.items()]
        if name.startswith("flashmoe_science.cuda.") and hasattr(module, "nvrtc_version")
    ]
    assert {module.__name__ for module in asking} == {device.__name__, wgmma.__name__}
    of_hopper = {
        *("attention_hopper", "attention_hopper_varlen", "moe_hopper", "moe_backward_hopper"),
        *("attention_backward_hopper", "attention_backward_two_pass_query"),
    }
    monkeypatch.setattr(wgmma, "nvrtc_version", lambda: (12, 8))
    assert not of_hopper & {kernel.function for kernel in kernels(["sm_90a"])}
    monkeypatch.setattr(wgmma, "nvrtc_version", lambda: (13, 0))
    assert of_hopper <= {kernel.function for kernel in kernels(["sm_90a"])}
