"""Correctness and timing of the small-shape CUDA attention kernel, configuration by configuration.

    python benchmarks/cuda_small.py --offline               compile for every architecture; needs no GPU
    python benchmarks/cuda_small.py --output small.json     everything, on the GPU at hand (about a minute)

GPU time is taken by replaying a graph of equal calls; implementations are interleaved within every round.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cuda.bindings import driver, nvrtc

KERNELS = Path(__file__).parent.parent / "src" / "flashmoe_science" / "kernels" / "cuda"
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")
FLOOR_SOURCE = r"""
extern "C" __global__ void empty_kernel() {}
extern "C" __global__ void load_barrier_store(const float4* in, float4* out) {
    __shared__ float4 tile[128];
    tile[threadIdx.x] = in[blockIdx.x * 128 + threadIdx.x];
    __syncthreads();
    out[blockIdx.x * 128 + threadIdx.x] = tile[127 - threadIdx.x];
}
"""


@dataclass(frozen=True)
class Config:
    """What may be tuned: query rows of a block / 8, warps, tiles of 16 keys per warp, blocks per cluster."""

    row_tiles: int
    warps: int
    key_tiles: int
    cluster: int = 1

    @property
    def keys_per_pass(self) -> int:
        return 16 * self.warps * self.key_tiles * self.cluster

    def __str__(self) -> str:
        return f"r{8 * self.row_tiles}w{self.warps}k{self.key_tiles}c{self.cluster}"


@dataclass(frozen=True)
class Problem:
    """A call's shape. ``dtype`` is ``bf16`` or ``fp16``."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = str(self.seqlen_q) if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}:{self.seqlen_k}"
        mask = "causal" if self.causal else "full"
        return f"({self.batch},{heads},{length},{self.head_dim}) {mask} {self.dtype}"


def parse(texts: str) -> list[Config]:
    """Configurations written as their numbers, separated by commas."""
    return [Config(*map(int, text.split())) for text in texts.split(",")]


def macros(problem: Problem, config: Config, **override: int) -> dict[str, int]:
    """The macros of the kernel for a call, each promise to it made only where it holds."""
    even = not problem.causal and problem.seqlen_k % config.keys_per_pass == 0
    late = problem.head_dim > 128 or (problem.head_dim > 64 and config.key_tiles > 1)
    values = {
        "HEAD_DIM": problem.head_dim,
        "ELEMENT_BF16": int(problem.dtype == "bf16"),
        "MMA_K": 16,
        "CAUSAL": int(problem.causal),
        "GROUPED": int(problem.heads != problem.kv_heads),
        "ROW_TILES": config.row_tiles,
        "WARPS": config.warps,
        "KEY_TILES": config.key_tiles,
        "CLUSTER": config.cluster,
        "SINGLE_PASS": int(problem.seqlen_k <= config.keys_per_pass),
        "MASKED": int(not even),
        "WIDE_OFFSETS": 0,
        "LATE_VALUES": int(late),
        "DEPENDENT": 0,
        "ABLATION": 0,
    }
    return values | override


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    log: str
    seconds: float


def compile_source(source: str, arch: str, defines: dict[str, int]) -> Compiled:
    """NVRTC: source text to cubin."""

    def check(result: tuple[Any, ...], log: str = "") -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {result[0].name} for {arch} {defines}\n{log}")
        return result[1] if len(result) > 1 else None

    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    options = [f"-arch={arch}", "-std=c++17", "-default-device", f"-I{KERNELS}"]
    options += ["--ptxas-options=-v", "--ptxas-options=-warn-spills", "--diag-suppress=177"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    start = time.perf_counter()
    result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    seconds = time.perf_counter() - start
    text = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
    check(nvrtc.nvrtcGetProgramLog(program, text))
    log = text.decode().rstrip("\0 \n")
    check(result, log)
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, log, seconds)


@cache
def compiled(arch: str, defines: tuple[tuple[str, int], ...]) -> Compiled:
    return compile_source((KERNELS / "attention_small.cu").read_text(), arch, dict(defines))


def drive(result: tuple[Any, ...]) -> Any:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"driver: {result[0].name}")
    return result[1] if len(result) > 1 else None


def load_function(cubin: bytes, name: bytes) -> Any:
    return drive(driver.cuModuleGetFunction(drive(driver.cuModuleLoadData(cubin)), name))


@cache
def kernel(arch: str, defines: tuple[tuple[str, int], ...]) -> Any:
    return load_function(compiled(arch, defines).cubin, b"attention_small")


@cache
def parameters_type(wide: bool) -> type[ctypes.Structure]:
    stride = ctypes.c_uint64 if wide else ctypes.c_uint32
    pointers = [(name, ctypes.c_void_p) for name in ("query", "key", "value", "output", "lse")]
    strides = [
        (f"{t}_{d}", stride) for t in ("query", "key", "value", "output") for d in ("batch", "head", "row")
    ]
    integers = [(name, ctypes.c_int32) for name in ("seqlen_q", "seqlen_k", "group")]
    rest = [("group_magic", ctypes.c_uint32), ("scale_log2", ctypes.c_float)]
    return type("Parameters", (ctypes.Structure,), {"_fields_": pointers + strides + integers + rest})


class Call:
    """A launch, ready to be repeated. Only the addresses of the tensors may change afterwards."""

    def __init__(
        self,
        problem: Problem,
        config: Config,
        tensors: Sequence[torch.Tensor],
        arch: str,
        lse: torch.Tensor | None = None,
        scale: float | None = None,
        **override: int,
    ) -> None:
        defines = macros(problem, config, **override)
        self.dependent = bool(defines["DEPENDENT"])
        self.function = kernel(arch, tuple(defines.items()))
        self.tensors = tensors
        group = problem.heads // problem.kv_heads
        scale = problem.head_dim**-0.5 if scale is None else scale
        parameters = parameters_type(bool(defines["WIDE_OFFSETS"]))()
        for name, tensor in zip(("query", "key", "value", "output"), tensors, strict=True):
            setattr(parameters, name, tensor.data_ptr())
            for dim, stride in zip(("batch", "head", "row"), tensor.stride(), strict=False):
                setattr(parameters, f"{name}_{dim}", 2 * stride)
        parameters.lse = None if lse is None else lse.data_ptr()
        parameters.seqlen_q, parameters.seqlen_k, parameters.group = problem.seqlen_q, problem.seqlen_k, group
        parameters.group_magic = 2**32 // group + 1 if group > 1 else 0
        parameters.scale_log2 = scale * 1.4426950408889634
        self.parameters = parameters
        self.arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        self.address = ctypes.addressof(self.arguments)
        rows = problem.seqlen_q * group
        self.grid = (-(-rows // (8 * config.row_tiles)) * config.cluster, problem.kv_heads, problem.batch)
        self.threads = 32 * config.warps

    def __call__(self) -> None:
        stream = torch._C._cuda_getCurrentRawStream(0)
        if self.dependent:
            launch = driver.CUlaunchConfig()
            launch.gridDimX, launch.gridDimY, launch.gridDimZ = self.grid
            launch.blockDimX, launch.blockDimY, launch.blockDimZ = self.threads, 1, 1
            launch.hStream = stream
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            launch.attrs = [attribute]
            launch.numAttrs = 1
            drive(driver.cuLaunchKernelEx(launch, self.function, self.address, 0))
        else:
            drive(
                driver.cuLaunchKernel(
                    self.function, *self.grid, self.threads, 1, 1, 0, stream, self.address, 0
                )
            )


# Correctness


def guarded(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, fill: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer full of ``fill``, and a (batch, heads, seq, head_dim) view with room around it."""
    batch, heads, length, head_dim = shape
    if layout == "bhsd":
        buffer = torch.full((batch, heads, length + 4, head_dim + 8), fill, dtype=dtype, device="cuda")
        return buffer, buffer[:, :, 2:-2, :head_dim]
    buffer = torch.full((batch, length + 4, heads + 1, head_dim + 8), fill, dtype=dtype, device="cuda")
    return buffer, buffer[:, 2:-2, :heads, :head_dim].transpose(1, 2)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and lse in the dtype of the inputs, unfused; rows without keys give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        i = torch.arange(q.shape[2], device=q.device)[:, None]
        j = torch.arange(k.shape[2], device=q.device)[None, :]
        scores = scores.masked_fill(j > i + k.shape[2] - q.shape[2], -torch.inf)
    if k.shape[2] == 0:
        return torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=q.dtype, device=q.device)
    lse = scores.logsumexp(-1)
    return scores.softmax(-1).nan_to_num(0.0) @ v, lse


@dataclass(frozen=True)
class Check:
    problem: Problem
    config: Config
    layout: str = "bhsd"
    magnitude: float = 1.0
    scale: float | None = None
    override: tuple[tuple[str, int], ...] = ()

    def defines(self) -> tuple[tuple[str, int], ...]:
        return tuple(macros(self.problem, self.config, **dict(self.override)).items())


def run_check(check: Check, arch: str) -> str | None:
    """None if right, else what is wrong."""
    problem = check.problem
    dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
    query_shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    key_shape = (problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
    torch.manual_seed(zlib.crc32(repr(check).encode()))
    views = []
    for shape, size in ((query_shape, check.magnitude), (key_shape, 1.0), (key_shape, 1.0)):
        _, view = guarded(shape, dtype, check.layout, torch.nan)
        view.copy_(torch.randn(shape, device="cuda") * size)
        views.append(view)
    q, k, v = views
    buffer, output = guarded(query_shape, dtype, check.layout, 7.0)
    output.fill_(torch.nan)
    lse = torch.full((*query_shape[:3],), 7.0, device="cuda")
    scale = problem.head_dim**-0.5 if check.scale is None else check.scale
    call = Call(problem, check.config, (q, k, v, output), arch, lse, scale, **dict(check.override))
    call()
    torch.cuda.synchronize()
    exact, exact_lse = reference(q.double(), k.double(), v.double(), problem.causal, scale)
    plain, _ = reference(q, k, v, problem.causal, scale)
    if not output.isfinite().all():
        return f"{int((~output.isfinite()).sum())} of {output.numel()} outputs are not finite"
    error = float((output.double() - exact).abs().max())
    rounding = float((exact - exact.to(dtype).double()).abs().max())
    allowed = 2 * float((plain.double() - exact).abs().nan_to_num(0.0).max()) + 2 * rounding + 1e-5
    if error > allowed:
        return f"error {error:.2e}, allowed {allowed:.2e}"
    if not torch.equal(lse.isneginf(), exact_lse.isneginf()):
        return "lse is -inf in the wrong rows"
    visible = ~exact_lse.isneginf()
    lse_error = float((lse.double() - exact_lse)[visible].abs().max()) if visible.any() else 0.0
    if lse_error > 1e-3 + (1e-5 * float(exact_lse[visible].abs().max()) if visible.any() else 0.0):
        return f"lse error {lse_error:.2e}"
    output.fill_(7.0)
    if not (buffer == 7.0).all():
        return "wrote outside the output"
    first = None
    for _ in range(20):
        call()
        if first is None:
            first = output.clone()
    torch.cuda.synchronize()
    return None if torch.equal(first, output) else "differs from run to run"


def checks() -> list[Check]:
    pairs = [
        (1, 1),
        (3, 3),
        (7, 16),
        (64, 32),
        (113, 203),
        (128, 128),
        (239, 1),
        (16, 512),
        (1, 500),
        (255, 256),
        (5, 0),
    ]
    texts = "1 1 1, 1 2 1, 1 4 1, 1 4 2, 1 8 2, 2 4 2, 2 8 4, 4 4 1, 1 3 1"
    texts += ", 1 4 1 2, 1 4 1 4, 2 4 2 4, 2 4 1 8, 4 4 1 8, 1 1 1 2, 1 2 1 8"
    configs = parse(texts)
    found = []
    for number, (config, causal) in enumerate(itertools.product(configs, (False, True))):
        dtype = "bf16" if number % 4 < 2 else "fp16"
        for index, (seqlen_q, seqlen_k) in enumerate(pairs):
            problem = Problem(2, 3, 3, seqlen_q, seqlen_k, 64, causal, dtype)
            found.append(
                Check(problem, config, "bshd" if index % 2 else "bhsd", 30.0 if index % 3 == 2 else 1.0)
            )
    for head_dim, causal in itertools.product((32, 40, 72, 96, 128, 160, 200, 256), (False, True)):
        wide = head_dim > 128
        for config in (Config(1, 4, 1), Config(1 if wide else 2, 4, 1), Config(1, 4, 1, 4)):
            for seqlen_q, seqlen_k in ((113, 203), (64, 64)):
                dtype = "bf16" if causal else "fp16"
                found.append(Check(Problem(2, 4, 2, seqlen_q, seqlen_k, head_dim, causal, dtype), config))
    for group, causal in itertools.product((2, 3, 8), (False, True)):
        for seqlen_q, seqlen_k in ((1, 1000), (13, 77), (100, 100)):
            for config in (Config(1, 4, 2), Config(2, 4, 2, 2)):
                found.append(Check(Problem(2, 2 * group, 2, seqlen_q, seqlen_k, 64, causal), config, "bshd"))
    problem = Problem(2, 3, 3, 128, 128, 64, False)
    plain = Config(1, 4, 2)
    found.append(Check(problem, plain, override=(("MASKED", 1), ("SINGLE_PASS", 0))))
    found.append(Check(problem, plain, override=(("WIDE_OFFSETS", 1),)))
    found.append(Check(problem, plain, override=(("DEPENDENT", 1),)))
    found.append(Check(problem, plain, scale=-0.5))
    found.append(Check(problem, plain, scale=0.0))
    found.append(Check(dataclasses.replace(problem, seqlen_k=256), plain, override=(("LATE_VALUES", 1),)))
    return found


# Timing


def sdpa(problem: Problem, tensors: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    q, k, v = tensors[:3]
    grouped = problem.heads != problem.kv_heads
    # The causal mask of SDPA is aligned top-left; for one query, bottom-right means that it sees everything.
    causal = problem.causal and problem.seqlen_q > 1
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def graph_of(call: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def race(calls: dict[str, Callable[[], Any]], per_graph: int = 50, rounds: int = 40) -> dict[str, float]:
    """Median GPU time of one call in microseconds, of implementations interleaved in every round."""
    graphs = {name: graph_of(call, per_graph) for name, call in calls.items()}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1000 / per_graph)
    return {name: statistics.median(values) for name, values in samples.items()}


def around_each_call(calls: dict[str, Callable[[], Any]], rounds: int = 200) -> dict[str, float]:
    """Median time between events around a call on an idle GPU, launch included, in microseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1000)
    return {name: statistics.median(values) for name, values in samples.items()}


CANDIDATES = {
    32: "1 1 2, 1 2 1, 2 1 2, 2 2 1",
    64: "1 1 4, 1 2 2, 1 4 1, 2 2 2, 2 4 1",
    128: "1 8 1, 1 4 2, 1 2 4, 2 4 2, 2 8 1, 1 4 1 2, 2 4 1 2, 1 2 1 4",
    256: "1 8 2, 1 4 4, 1 16 1, 2 8 2, 2 4 4, 1 4 2 2, 1 4 1 4, 2 4 1 4, 2 4 2 2, 2 2 1 8",
    512: "1 8 4, 1 16 2, 2 8 4, 1 4 2 4, 2 4 2 4, 2 8 2 2, 2 4 1 8, 4 4 2 4, 4 4 1 8, 2 8 1 4",
}
SHAPES = [(1, 1, 32), (1, 1, 64), (1, 1, 128), (1, 1, 256), (1, 1, 512), (2, 4, 128)]
DECODE = {
    Problem(1, 32, 8, 1, 4096, 128, True): "1 4 2 8, 1 8 1 8, 1 4 1 8, 1 8 2 8",
    Problem(8, 32, 8, 1, 4096, 128, True): "1 4 2 2, 1 4 1 4, 1 8 1 2, 1 4 1 8",
    Problem(1, 8, 8, 1, 16384, 64, True): "1 8 2 8, 1 8 4 8, 1 16 1 8, 1 8 4 4",
    Problem(4, 16, 16, 8, 1024, 64, False): "1 4 2 2, 1 8 2 1, 1 8 1 2, 1 4 1 4",
}


def tensors_for(problem: Problem) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
    query = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    key = (problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in (query, key, key, query)]


def fits(problem: Problem, config: Config) -> bool:
    quads = 4 * config.row_tiles * -(-problem.head_dim // 64)
    shares = -(-quads // config.cluster) * config.cluster if config.cluster > 1 else 0
    shared = 512 * (quads * config.warps + shares) + 64 * config.row_tiles * (config.warps + config.cluster)
    return shared <= 48 * 1024 or config.warps * config.cluster == 1


def time_problem(problem: Problem, configs: list[Config], arch: str) -> dict[str, Any]:
    tensors = tensors_for(problem)
    configs = [config for config in configs if fits(problem, config)]
    calls: dict[str, Callable[[], Any]] = {"sdpa": sdpa(problem, tensors)}
    calls |= {str(config): Call(problem, config, tensors, arch) for config in configs}
    times = race(calls)
    best = min(configs, key=lambda config: times[str(config)])
    overrides = {
        "load only": {"ABLATION": 1},
        "no softmax": {"ABLATION": 2},
        "no merge": {"ABLATION": 3},
        "masked": {"MASKED": 1},
        "multi-pass": {"SINGLE_PASS": 0},
        "dependent": {"DEPENDENT": 1},
    }
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(lambda o: compiled(arch, tuple(macros(problem, best, **o).items())), overrides.values())
        )
    variants: dict[str, Callable[[], Any]] = {"best": calls[str(best)]}
    variants |= {name: Call(problem, best, tensors, arch, **o) for name, o in overrides.items()}
    ablations = race(variants)

    best_call = Call(problem, best, tensors, arch)
    query = tensors[0]

    def allocate_and_launch() -> torch.Tensor:
        output = torch.empty_like(query)
        best_call.parameters.output = output.data_ptr()
        best_call()
        return output

    events = around_each_call(
        {"sdpa": calls["sdpa"], "best": allocate_and_launch, "launch only": calls[str(best)]}
    )
    return {
        "problem": str(problem),
        "sdpa": times["sdpa"],
        "best": str(best),
        "time": times[str(best)],
        "times": times,
        "ablations": ablations,
        "events": events,
    }


def floors(arch: str) -> dict[str, float]:
    cubin = compile_source(FLOOR_SOURCE, arch, {}).cubin
    empty, store = load_function(cubin, b"empty_kernel"), load_function(cubin, b"load_barrier_store")
    source, target = torch.randn(2, 64 * 512, device="cuda")
    pointers = (ctypes.c_void_p * 2)(source.data_ptr(), target.data_ptr())
    arguments = (ctypes.c_void_p * 2)(ctypes.addressof(pointers), ctypes.addressof(pointers) + 8)

    def launch(function: Any, blocks: int, address: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(0)
        drive(driver.cuLaunchKernel(function, blocks, 1, 1, 128, 1, 1, 0, stream, address, 0))

    address = ctypes.addressof(arguments)
    calls: dict[str, Callable[[], Any]] = {
        "empty, 1 block": lambda: launch(empty, 1, 0),
        "empty, 64 blocks": lambda: launch(empty, 64, 0),
        "load-barrier-store, 1 block": lambda: launch(store, 1, address),
        "load-barrier-store, 64 blocks": lambda: launch(store, 64, address),
    }
    return race(calls) | {"events, empty": around_each_call({"empty": calls["empty, 1 block"]})["empty"]}


def offline() -> int:
    """Compiles what the timing runs for every architecture; fails on a spill or a stack frame."""
    failed = 0
    jobs = []
    for arch, dtype, causal in itertools.product(ARCHITECTURES, ("bf16", "fp16"), (False, True)):
        if arch == "sm_75" and dtype == "bf16":
            continue
        for batch, heads, length in SHAPES:
            problem = Problem(batch, heads, heads, length, length, 64, causal, dtype)
            jobs += [(arch, problem, config, {}) for config in parse(CANDIDATES[length])]
        for head_dim, config in itertools.product(
            (32, 96, 128, 192, 256), (Config(1, 4, 1), Config(1, 4, 1, 8))
        ):
            problem = Problem(1, 4, 2, 1, 4096, head_dim, causal, dtype)
            for wide in (0, 1):
                jobs.append((arch, problem, config, {"WIDE_OFFSETS": wide}))
    for arch, problem, config, override in dict.fromkeys((a, p, c, tuple(o.items())) for a, p, c, o in jobs):
        if (config.cluster > 1 and arch != "sm_90a") or not fits(problem, config):
            continue
        defines = macros(problem, config, MMA_K=8 if arch == "sm_75" else 16, **dict(override))
        result = compiled(arch, tuple(defines.items()))
        clean = " 0 bytes stack frame, 0 bytes spill stores" in result.log
        used = next(line for line in result.log.splitlines() if "Used " in line).split("Used ")[1]
        if not clean:
            failed += 1
        print(f"{arch:7} {problem!s:32} {config!s:12} {used}{'' if clean else '   SPILLS'}", flush=True)
    print(f"{failed} configurations spill or have a stack frame")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--offline", action="store_true", help="compile for every architecture and stop")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    if arguments.offline:
        return offline()
    start = time.perf_counter()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    arch += "a" if arch == "sm_90" else ""
    torch.zeros(1, device="cuda")

    to_check = [check for check in checks() if fits(check.problem, check.config)]
    problems = [
        (Problem(batch, heads, heads, length, length, 64, causal), parse(CANDIDATES[length]))
        for causal in (False, True)
        for batch, heads, length in SHAPES
    ]
    problems += [(problem, parse(texts)) for problem, texts in DECODE.items()]
    needed = {check.defines() for check in to_check}
    needed |= {tuple(macros(p, c).items()) for p, configs in problems for c in configs if fits(p, c)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda defines: compiled(arch, defines), needed))
    print(f"{len(needed)} kernels compiled, {time.perf_counter() - start:.1f} s", flush=True)

    failures = []
    for check in to_check:
        try:
            wrong = run_check(check, arch)
        except RuntimeError as error:
            wrong = str(error).splitlines()[0]
        if wrong:
            failures.append(f"{check.problem} {check.config} {check.layout} {dict(check.override)}: {wrong}")
    print(f"{len(to_check)} checks, {len(failures)} wrong, {time.perf_counter() - start:.1f} s", flush=True)
    print("\n".join(failures[:25]), flush=True)

    report: dict[str, Any] = {"failures": failures, "checks": len(to_check), "floors": floors(arch)}
    print({name: round(value, 2) for name, value in report["floors"].items()}, flush=True)
    report["results"] = []
    for problem, configs in problems:
        try:
            report["results"].append(time_problem(problem, configs, arch))
        except RuntimeError as error:
            failures.append(f"timing {problem}: {str(error).splitlines()[0]}")
            print(failures[-1], flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(report, indent=1))
    for result in report["results"]:
        print(f"\n{result['problem']}")
        print("  " + "  ".join(f"{name} {value:.2f}" for name, value in result["times"].items()))
        print("  " + "  ".join(f"{name} {value:.2f}" for name, value in result["ablations"].items()))
    print(
        f"\n{'shape':32} {'sdpa':>7} {'best':>7} {'ratio':>6} {'events':>7} {'best':>7} {'ratio':>6}  config"
    )
    for result in report["results"]:
        pairs = ((result["sdpa"], result["time"]), (result["events"]["sdpa"], result["events"]["best"]))
        columns = [f"{base:7.2f} {own:7.2f} {base / own:6.2f}" for base, own in pairs]
        print(f"{result['problem']:32} {' '.join(columns)}  {result['best']}")
    print(f"{len(failures)} of {len(to_check)} checks wrong, {time.perf_counter() - start:.1f} s in all")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
