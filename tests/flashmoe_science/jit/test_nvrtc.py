from __future__ import annotations

from pathlib import Path

import pytest

from cudadent42.base.compile_cache import entries
from flashmoe_science.errors import BuildError, DeviceError, KernelDefectError
from flashmoe_science.jit import nvrtc
from flashmoe_science.jit.cache import CompileCache
from flashmoe_science.jit.nvrtc import CudaKernel, compile_kernel

pytestmark = pytest.mark.usefixtures("nvrtc")

_ADD = """
#include "part/width.cuh"
extern "C" __global__ void __launch_bounds__(128) add(float* x) {
    __shared__ float staging[WIDTH];
    staging[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = staging[(threadIdx.x + STEP) % WIDTH] + 1.0f;
}
"""
# More live values than there are registers.
_SPILL = """
extern "C" __global__ void __launch_bounds__(1024) add(float* x) {
    float v[128];
    #pragma unroll
    for (int i = 0; i < 128; ++i) v[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[127 - i] + v[(i * 7) % 128];
}
"""


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cache")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "kernels" / "part").mkdir(parents=True)
    (tmp_path / "kernels" / "part" / "width.cuh").write_text("#define WIDTH 128\n")
    return tmp_path / "kernels"


def kernel(sources: Path, text: str = _ADD, architecture: str = "sm_90", shared: int = 0) -> CudaKernel:
    (sources / "add.cu").write_text(text)
    return CudaKernel("add.cu", "add", architecture, {"STEP": 1}, 128, shared, sources, sources)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_120"])
def test_a_cubin_and_its_resource_table(sources: Path, cache: CompileCache, architecture: str) -> None:
    build = compile_kernel(kernel(sources, architecture=architecture, shared=1024), cache)
    assert build.artifact.read_bytes()[:4] == b"\x7fELF"
    assert build.recipe.architecture == architecture
    assert set(build.recipe.sources) == {"add.cu", "part/width.cuh"}
    resources = build.resources
    assert resources is not None
    assert 0 < resources.registers_per_thread < 64
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0)
    assert (resources.static_shared_bytes, resources.dynamic_shared_bytes) == (512, 1024)
    assert resources.blocks_per_sm >= 8


def test_the_second_time_it_is_cached_until_something_changes(sources: Path, cache: CompileCache) -> None:
    first = compile_kernel(kernel(sources), cache)
    again = compile_kernel(kernel(sources), cache)
    assert (first.cached, again.cached) == (False, True)
    assert (again.key, again.resources) == (first.key, first.resources)
    (sources / "part" / "width.cuh").write_text("#define WIDTH 256\n")
    changed = compile_kernel(kernel(sources), cache)
    assert not changed.cached
    assert changed.key != first.key


def test_a_compile_error_is_one_line_with_the_place_and_the_log_beside_it(
    sources: Path, cache: CompileCache
) -> None:
    with pytest.raises(
        BuildError, match=r"add.*does not compile for sm_90: add.cu\(4\): error: .*nonsense"
    ) as caught:
        compile_kernel(
            kernel(sources, _ADD.replace("float staging[WIDTH]", "nonsense staging[WIDTH]")), cache
        )
    assert "\n" not in str(caught.value)
    assert "add.cu" in caught.value.log
    assert entries(cache) == []


def test_spills_are_a_failure(sources: Path, cache: CompileCache) -> None:
    for _ in range(2):  # compiled, and found in the cache
        with pytest.raises(KernelDefectError, match=r"spills \d+ bytes of registers to memory") as caught:
            compile_kernel(kernel(sources, _SPILL), cache)
        assert "spill stores" in caught.value.log


def test_spills_are_taken_where_they_are_allowed(sources: Path, cache: CompileCache) -> None:
    build = compile_kernel(kernel(sources, _SPILL), cache, allow_defects=True)
    assert build.resources is not None
    assert build.resources.spill_store_bytes > 0
    with pytest.raises(KernelDefectError):
        compile_kernel(kernel(sources, _SPILL), cache)
    assert len(entries(cache)) == 1


def test_serialised_wgmma_is_a_failure(sources: Path, cache: CompileCache) -> None:
    text = """
    extern "C" __global__ void add(float* x) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        x[threadIdx.x] = 1.0f;
    }
    """
    with pytest.raises(BuildError, match=r"makes ptxas warn: .*C75\d\d"):
        compile_kernel(kernel(sources, text, "sm_90a"), cache)


def test_a_tile_that_cannot_fit_is_refused_before_compiling(sources: Path, cache: CompileCache) -> None:
    with pytest.raises(
        BuildError, match=r"add.*120,000 bytes of shared memory per block, and sm_86 has 101,376"
    ):
        compile_kernel(kernel(sources, "not even CUDA", "sm_86", 120_000), cache)


def test_unknown_architectures_and_missing_sources(sources: Path, cache: CompileCache) -> None:
    with pytest.raises(DeviceError, match="unknown GPU architecture 'sm_1'"):
        compile_kernel(kernel(sources, architecture="sm_1"), cache)
    missing = CudaKernel("absent.cu", "absent", "sm_90", {}, 128, 0, sources)
    with pytest.raises(BuildError, match=r"absent.cu cannot be read"):
        compile_kernel(missing, cache)


def test_the_compiler_knows_the_architectures_that_we_build_for() -> None:
    assert nvrtc.nvrtc_version() >= (12, 6)
    assert {75, 80, 86, 89, 90} <= set(nvrtc.supported_architectures())
