"""Profiles of kernels with a known fault, of their mended twins, and of good kernels: what the diagnosis is tried on.

    python benchmarks/profile_kernels.py --output FOLDER [--full]

Needs an NVIDIA GPU, Nsight Compute and open counters. Every kernel is launched a few times, then once under the
profiler, clocks left alone; FOLDER gets ``profiles.json`` (the metrics of each by Nsight Compute's names, the work
that it is meant to do, and this machine's measured ceilings) and ``profiles.ncu-rep``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from provenance import provenance
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from cudadent42.preflight import ncu_install
from cudadent42.stages.profile import ncu
from cudadent42.timing.peaks import measure_cuda_peaks
from flashmoe_science import flash_attention
from flashmoe_science.cuda.attention import forward, portable
from flashmoe_science.cuda.attention.forward import _problem
from flashmoe_science.cuda.attention.problem import result_like
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.driver import load, make_context_current
from flashmoe_science.cuda.launch import Launcher
from flashmoe_science.jit.nvrtc import CudaKernel

FAULTS = Path(__file__).parent / "faults"
_MACROS = {"ELEMENT_BF16": 1, "NATIVE_CP_ASYNC": 1, "MMA_K": 16}
_MOST_LAUNCHES = 64
_TIMEOUT_S = 300.0
Call = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """One kernel, and what it does."""

    name: str
    fault: str
    """What is wrong with it; empty where nothing is known to be."""
    flops: float
    bytes_min: float
    make: Callable[[], Call]


def _kernel(name: str, threads: int, shared_bytes: int, **macros: int) -> CudaKernel:
    architecture = device_of(0).architecture
    target = f"{architecture}a" if architecture == "sm_90" else architecture
    return CudaKernel(
        f"{name}.cu", name, target, {**_MACROS, **macros}, threads, shared_bytes, directory=FAULTS
    )


def _launch(kernel: CudaKernel, grid: int, layout: str, *fields: object) -> Call:
    """A call of a kernel whose one argument is a struct of these fields; tensors go in as addresses."""
    make_context_current(0)
    function = load(kernel, 0, capturing=False, allow_defects=True)
    launcher = Launcher(function, (grid, 1, 1), kernel, struct.calcsize(layout))
    values = [field.data_ptr() if isinstance(field, torch.Tensor) else field for field in fields]
    struct.pack_into(layout, launcher.buffer, 0, *values)

    def call() -> object:
        launcher.start(torch.cuda.current_stream().cuda_stream)
        return fields  # kept alive as long as the call

    return call


_SIDE = 4096


def _product(swizzled: int, stages: int, shared_bytes: int) -> Call:
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(_SIDE, _SIDE, device="cuda", dtype=torch.float32)
    kernel = _kernel("tile_product", 128, shared_bytes, SWIZZLED=swizzled, STAGES=stages)
    call = _launch(kernel, (_SIDE // 64) ** 2, "3Qi4x", a, b, out, _SIDE)
    call()
    expected = a.float() @ b.float().T
    error = (out - expected).abs().max() / expected.abs().max()
    assert error < 1e-2, f"the tile product is wrong by {error}"
    return call


_COPY_BYTES = 1 << 29


def _copy(wide: int) -> Call:
    source = torch.randint(0, 255, (_COPY_BYTES,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    per_block = 16384 if wide else 1024
    call = _launch(
        _kernel("copy", 256, 0, WIDE=wide), _COPY_BYTES // per_block, "2Qq", source, target, _COPY_BYTES
    )
    call()
    assert torch.equal(source, target)
    return call


_SUM_BLOCKS, _SUM_ROUNDS = 8 * 132 * 4, 200


def _sums(blocks: int) -> Call:
    values, out = (torch.rand(_SUM_BLOCKS * 256, device="cuda") * 0.5 for _ in range(2))
    return _launch(
        _kernel("accumulate", 256, 0, BLOCKS=blocks), _SUM_BLOCKS, "2Qi4x", values, out, _SUM_ROUNDS
    )


_WAVE_SHARED, _WAVE_ROUNDS = 120_000, 20_000


def _waves(more: float) -> Call:
    grid = round(torch.cuda.get_device_properties(0).multi_processor_count * more)
    out = torch.empty(grid * 512, device="cuda")
    return _launch(_kernel("waves", 512, _WAVE_SHARED), grid, "Qi4x", out, _WAVE_ROUNDS)


_CHASE_BLOCKS, _CHASE_THREADS, _CHASE_STEPS, _CHASE_ENTRIES = 132, 64, 4096, 1 << 22


def _chase(chains: int) -> Call:
    order = torch.randperm(_CHASE_ENTRIES, device="cuda")
    links = torch.empty(_CHASE_ENTRIES, device="cuda", dtype=torch.int32)
    links[order] = order.roll(-1).int()
    out = torch.empty(_CHASE_BLOCKS * _CHASE_THREADS, device="cuda", dtype=torch.int32)
    return _launch(
        _kernel("chase", _CHASE_THREADS, 0, CHAINS=chains), _CHASE_BLOCKS, "2Qi4x", links, out, _CHASE_STEPS
    )


_REREAD_BLOCKS, _REREAD_ROUNDS, _REREAD_TILE = 132 * 8, 200, 16384


def _reread(shared: int) -> Call:
    source = torch.randint(0, 255, (_REREAD_BLOCKS * _REREAD_TILE,), device="cuda", dtype=torch.uint8)
    out = torch.empty(_REREAD_BLOCKS * 256, device="cuda", dtype=torch.int32)
    kernel = _kernel("reread", 256, 0, SHARED=shared)
    return _launch(kernel, _REREAD_BLOCKS, "2Qi4x", source, out, _REREAD_ROUNDS)


_RANDOM_BLOCKS, _RANDOM_ROUNDS = 132 * 8, 1000


def _random_sums(shifts: int) -> Call:
    out = torch.empty(_RANDOM_BLOCKS * 256, device="cuda", dtype=torch.int32)
    kernel = _kernel("random_sums", 256, 0, SHIFTS=shifts)
    return _launch(kernel, _RANDOM_BLOCKS, "Qi4x", out, _RANDOM_ROUNDS)


def _qkv(
    batch: int, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int
) -> tuple[torch.Tensor, ...]:
    sizes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    return tuple(torch.randn(batch, h, s, head_dim, device="cuda", dtype=torch.bfloat16) for h, s in sizes)


def _ours(*shape: int, causal: bool = False) -> Call:
    query, key, value = _qkv(*shape)
    return lambda: flash_attention(query, key, value, causal=causal)


def _portable(*shape: int) -> Call:
    query, key, value = _qkv(*shape)
    problem = _problem(query, key, value, result_like(query), False, None, False)
    choice = portable.choose(problem, device_of(0))
    return lambda: forward(query, key, value, choice=choice)


def _torch(backend: SDPBackend, *shape: int) -> Call:
    query, key, value = _qkv(*shape)

    def call() -> object:
        with sdpa_kernel(backend):
            return sdpa(query, key, value)

    return call


def _matmul(side: int) -> Call:
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _elementwise() -> Call:
    source = torch.rand(_COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return lambda: torch.neg(source, out=target)


def _softmax() -> Call:
    source = torch.randn(16384, 8192, device="cuda")
    target = torch.empty_like(source)
    return lambda: torch.softmax(source, -1, out=target)


def _attention(name: str, make: Callable[..., Call], shape: tuple[int, ...], causal: bool = False) -> Subject:
    batch, heads, kv_heads, rows, keys, head_dim = shape
    flops = 4.0 * batch * heads * rows * keys * head_dim * (0.5 if causal else 1)
    size = 2.0 * batch * head_dim * (2 * heads * rows + 2 * kv_heads * keys)
    return Subject(name, "", flops, size, lambda: make(*shape, causal=True) if causal else make(*shape))


_LONG = (1, 16, 16, 16384, 16384, 128)
_PRODUCT = (2.0 * _SIDE**3, 2.0 * 2 * _SIDE**2 + 4.0 * _SIDE**2)
_SUMS = (2.0 * 64 * _SUM_ROUNDS * _SUM_BLOCKS * 256, 8.0 * _SUM_BLOCKS * 256)
_WAVE_FLOPS = 2.0 * 8 * _WAVE_ROUNDS * 512 * 132
_CHASE_BYTES = 4.0 * _CHASE_ENTRIES
_REREAD_BYTES = 1.0 * _REREAD_BLOCKS * _REREAD_TILE

SUBJECTS = (
    Subject("unswizzled", "bank conflicts", *_PRODUCT, lambda: _product(0, 3, 3 * 16384)),
    Subject("serialised", "nothing overlaps", *_PRODUCT, lambda: _product(1, 1, 8 * 16384)),
    Subject("product", "", *_PRODUCT, lambda: _product(1, 3, 3 * 16384)),
    Subject("narrow-copy", "4-byte loads", 0.0, 2.0 * _COPY_BYTES, lambda: _copy(0)),
    Subject("wide-copy", "", 0.0, 2.0 * _COPY_BYTES, lambda: _copy(1)),
    Subject("spilled", "spilled registers", *_SUMS, lambda: _sums(8)),
    Subject("unspilled", "", *_SUMS, lambda: _sums(2)),
    Subject("wave-and-a-bit", "a grid of one wave and a bit", 1.1 * _WAVE_FLOPS, 0.0, lambda: _waves(1.1)),
    Subject("one-wave", "", _WAVE_FLOPS, 0.0, lambda: _waves(1.0)),
    Subject("chase", "one load at a time", 0.0, _CHASE_BYTES, lambda: _chase(1)),
    Subject("chase-many", "", 0.0, _CHASE_BYTES, lambda: _chase(8)),
    Subject("reread", "data that stays in L2", 0.0, _REREAD_BYTES, lambda: _reread(0)),
    Subject("kept", "", 0.0, _REREAD_BYTES, lambda: _reread(1)),
    Subject("shifts", "integer and logic instructions", 0.0, 0.0, lambda: _random_sums(1)),
    Subject("multiply-add", "", 0.0, 0.0, lambda: _random_sums(0)),
    _attention("hopper-full", _ours, _LONG),
    _attention("hopper-causal", _ours, _LONG, causal=True),
    _attention("hopper-d64", _ours, (1, 32, 32, 16384, 16384, 64)),
    _attention("hopper-d256", _ours, (1, 8, 8, 16384, 16384, 256)),
    _attention("decode", _ours, (8, 32, 8, 1, 8192, 128)),
    _attention("decode-long", _ours, (4, 32, 8, 1, 32768, 128)),
    _attention("portable", _portable, (1, 16, 16, 8192, 8192, 128)),
    _attention("torch-flash", lambda *shape: _torch(SDPBackend.FLASH_ATTENTION, *shape), _LONG),
    _attention("torch-cudnn", lambda *shape: _torch(SDPBackend.CUDNN_ATTENTION, *shape), _LONG),
    Subject("torch-matmul", "", 2.0 * 8192**3, 6.0 * 8192**2, lambda: _matmul(8192)),
    Subject("torch-elementwise", "", 0.0, 2.0 * _COPY_BYTES, _elementwise),
    Subject("torch-softmax", "", 0.0, 8.0 * 16384 * 8192, _softmax),
)


def launch_all() -> None:
    """Every subject once between the marks that the profiler heeds."""
    for subject in SUBJECTS:
        torch.manual_seed(0)
        call = subject.make()
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del call
        torch.cuda.empty_cache()


def measure(folder: Path, full: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = ncu_install.find()
    if path is None:
        sys.exit("there is no Nsight Compute on this machine")
    report = folder / "profiles.ncu-rep"
    target = (sys.executable, str(Path(__file__).resolve()), "--launch")
    arguments = ncu.command(path, report, target, full=full, cold=False, launches=_MOST_LAUNCHES)
    ncu.run(arguments, report, timeout_s=_TIMEOUT_S, log=folder / "ncu.log")
    print("profiled, reading the report", flush=True)
    launches = ncu.read(path, report)
    if len(launches) != len(SUBJECTS):
        sys.exit(f"{len(SUBJECTS)} kernels were expected, profiled were {[one.kernel for one in launches]}")
    document = {
        "schema_version": 1,
        "tool": f"Nsight Compute {ncu_install.tool(path).version_text}",
        "provenance": provenance("cuda"),
        "peaks": measure_cuda_peaks("cuda:0"),
        "subjects": [
            {
                **{field.name: getattr(subject, field.name) for field in dataclasses.fields(subject)[:-1]},
                "kernel": launch.kernel,
                "metrics": {name: [raw.value, raw.unit] for name, raw in launch.metrics.items()},
            }
            for subject, launch in zip(SUBJECTS, launches, strict=True)
        ],
    }
    (folder / "profiles.json").write_text(json.dumps(document, indent=1) + "\n")
    for subject, launch in zip(SUBJECTS, launches, strict=True):
        print(f"{subject.name:18} {launch.kernel[:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--full", action="store_true", help="all sections, not only those that rules read")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch_all()
    elif options.output:
        measure(options.output, options.full)
    else:
        parser.error("--output is missing")


if __name__ == "__main__":
    main()
