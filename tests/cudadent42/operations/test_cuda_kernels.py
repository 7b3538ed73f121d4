"""Building ahead: every configuration of every kernel compiles for every architecture, without a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from cudadent42.operations import definition, names
from cudadent42.operations.cuda_kernels import build, kernels
from flashmoe_science.cuda import device, wgmma
from flashmoe_science.cuda.attention import KernelKind
from flashmoe_science.cuda.attention.select import module
from flashmoe_science.errors import DeviceError
from flashmoe_science.jit.cache import CompileCache
from flashmoe_science.jit.limits import base_architecture
from flashmoe_science.jit.nvrtc import CudaKernel

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")
OF_NO_OPERATION = {"attention_backward_sinks", "key_lists", "rotate"}
"""Functions of kernels that no case of the lab leads to: gradients with sinks, masks as lists of keys, and queries and
keys by positions.
"""
CUDA = Path(device.__file__).parent


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
    backward = {f"attention_backward_{step}" for step in ("statistics", "query", "key_value", "sinks")}
    assert turing == {
        "attention_portable",
        "attention_small",
        "attention_decode",
        "topk_routing",
        "rotate",
        "key_lists",
    } | backward | {"paged_append"}
    functions = {kernel.function for kernel in kernels(["sm_80"])}
    few = {"moe_few_split", "moe_few_tiles", "moe_few_combined"}
    moe = {"moe_portable", "moe_count", "moe_place", "moe_combine"}
    losses = {"topk_routing_backward", "routing_losses"}
    experts = {
        f"moe_backward_{step}" for step in ("portable", "portable_weights", "routing", "bias", "bias_routing")
    }
    assert functions == turing | few | moe | losses | experts | {"attention_varlen"}
    hopper = {"attention_decode_hopper", "attention_hopper", "attention_hopper_varlen", "moe_hopper"}
    hopper |= {"attention_mixed_hopper"}
    hopper |= {
        f"attention_backward_{step}"
        for step in ("short", "prepare", "hopper", "convert", "two_pass_query", "two_pass_key_value")
    }
    hopper |= {f"moe_backward_{step}" for step in ("weights", "hopper")}
    assert {kernel.function for kernel in kernels(["sm_90"])} == functions | hopper
    assert kernels(["sm_90"]) == kernels(["sm_90a"])
    assert len(kernels(["sm_80", "sm_86", "sm_80"])) == len(kernels(["sm_80"])) + len(kernels(["sm_86"]))
    assert all(module(kind).kernels("sm_90") for kind in KernelKind)


def key(kernel: CudaKernel) -> tuple[str, str]:
    return kernel.architecture, kernel.label


@pytest.fixture
def any_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is listed for sm_90 depends on the compiler's version, and here none has to be installed."""
    monkeypatch.setattr(wgmma, "nvrtc_version", lambda: (13, 0))


@pytest.mark.usefixtures("any_compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_operations_have_all_kernels_but_those_of_none(architecture: str) -> None:
    """What a new module lists is built ahead, and found missing here unless an operation has it as its own."""
    built = {key(each): each.function for each in kernels([architecture])}
    own = {key(each) for name in names() for each in definition(name).cuda_kernels([architecture])}
    assert own < built.keys()
    assert {function for each, function in built.items() if each not in own} == OF_NO_OPERATION


@pytest.mark.usefixtures("any_compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_module_that_lists_kernels_is_found(architecture: str) -> None:
    """By the text of each file, as it may lie where no package is."""
    files = [path for path in CUDA.rglob("*.py") if "\ndef kernels(" in path.read_text(encoding="utf-8")]
    files.remove(CUDA / "__init__.py")
    assert len(files) > 15
    built = {key(each) for each in kernels([architecture])}
    for path in files:
        name = ".".join(("flashmoe_science.cuda", *path.relative_to(CUDA).with_suffix("").parts))
        own = sys.modules[name].kernels(base_architecture(architecture))
        assert {key(each) for each in own} <= built, name


@pytest.mark.usefixtures("any_compiler")
def test_every_source_is_built_ahead() -> None:
    sources = {path.name for path in (CUDA.parent / "kernels" / "cuda").glob("*.cu")}
    assert {each.source for each in kernels(["sm_90"])} == sources


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
        *("attention_backward_short", "attention_backward_hopper", "attention_backward_two_pass_query"),
    }
    monkeypatch.setattr(wgmma, "nvrtc_version", lambda: (12, 8))
    assert not of_hopper & {kernel.function for kernel in kernels(["sm_90a"])}
    monkeypatch.setattr(wgmma, "nvrtc_version", lambda: (13, 0))
    assert of_hopper <= {kernel.function for kernel in kernels(["sm_90a"])}
