"""Development bench of the Hopper kernel: builds variants, checks each, races them against cuDNN in one process.

    python benchmarks/cuda_hopper.py --variants benchmarks/hopper_variants.json --output hopper.json

The official figures come from ``cudadent42 run --suite hopper``; this script is for trying many variants in little GPU
time. A variant is a set of macros over the defaults of its head dim.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from cuda.bindings import driver, nvrtc
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = Path(__file__).parents[1] / "src/flashmoe_science/kernels/cuda"
BASE = {"ELEMENT_BF16": 1, "MMA_K": 16, "K_STAGES": 2, "V_STAGES": 2, "Q_STAGES": 1, "PING_PONG": 1}


def check(result):
    if int(result[0]) != 0:
        raise RuntimeError(f"{result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


def compile_cubin(macros: dict[str, int]) -> tuple[bytes, str]:
    source = (KERNELS / "attention_hopper.cu").read_text()
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"attention_hopper.cu", 0, [], []))
    options = [
        "--gpu-architecture=sm_90a",
        "--std=c++17",
        f"-I{KERNELS}",
        "-default-device",
        "--ptxas-options=-v",
    ]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
    log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.decode(errors="replace")
    if int(status) != 0:
        raise RuntimeError(text)
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return cubin, text


class Parameters(ctypes.Structure):
    _fields_ = [
        ("maps", ctypes.c_uint64 * 48),
        ("output", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("ticket", ctypes.c_void_p),
        ("scale_log2", ctypes.c_float),
        ("integers", ctypes.c_int * 9),
        ("strides", ctypes.c_int64 * 3),
        ("padding", ctypes.c_int64 * 5),
    ]


@dataclass
class Variant:
    label: str
    macros: dict[str, int]
    log: str = ""
    function: object = None
    shared: int = 0
    options: dict = field(default_factory=dict)

    def load(self, cubin: bytes) -> None:
        module = check(driver.cuModuleLoadData(cubin))
        self.function = check(driver.cuModuleGetFunction(module, b"attention_hopper"))
        m = self.macros
        panels = (m["HEAD_DIM"] + 63) // 64
        query = m["Q_STAGES"] * m["CONSUMERS"] * panels * 64 * 128
        keys = (m["K_STAGES"] + m["V_STAGES"]) * panels * m["BLOCK_N"] * 128
        self.shared = query + keys + 2048
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(self.function, attribute, self.shared)


def tensor_map(t: torch.Tensor, rows: int) -> bytes:
    b, h, s, d = t.shape
    kind = driver.CUtensorMapDataType
    dtype = (
        kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        if t.dtype == torch.bfloat16
        else kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    )
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    tm = check(
        driver.cuTensorMapEncodeTiled(
            dtype,
            4,
            t.data_ptr(),
            [u64(x) for x in (d, s, h, b)],
            [u64(2 * x) for x in (t.stride(2), t.stride(1), t.stride(0))],
            [u32(x) for x in (64, rows, 1, 1)],
            [u32(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(tm.getPtr(), 128)


TICKET = torch.zeros(1, dtype=torch.int32, device="cuda")
SMS = torch.cuda.get_device_properties(0).multi_processor_count
L2_BUDGET = 32 << 20
CLOCKS: dict[str, tuple[int, float]] = {}


def launcher(v: Variant, q, k, v_, out, lse=None, scale=None):
    b, h, sq, d = q.shape
    hk, sk = k.shape[1], k.shape[2]
    m = v.macros
    block_m = 64 * m["CONSUMERS"]
    p = Parameters()
    raw = b"".join((tensor_map(q, 64), tensor_map(k, m["BLOCK_N"]), tensor_map(v_, m["BLOCK_N"])))
    ctypes.memmove(p.maps, raw, 384)
    p.output = out.data_ptr()
    p.strides[:] = out.stride()[:3]
    p.lse = lse.data_ptr() if lse is not None else None
    p.ticket = TICKET.data_ptr()
    scale = scale if scale is not None else d**-0.5
    p.scale_log2 = scale * math.log2(math.e)
    m_blocks = -(-sq // block_m)
    tiles = m_blocks * b * h
    group = h // hk
    kv_bytes = 2 * sk * d * 2
    section = max(1, min(b * h, v.options.get("l2", L2_BUDGET) // kv_bytes * group))
    if not m["CAUSAL"] and not v.options.get("section_full"):
        section = group
    p.integers[:] = [sq, sk, h, group, m_blocks, b * h, section, tiles, d]
    grid = min(SMS, tiles)
    address = ctypes.addressof(p)
    arguments = (ctypes.c_void_p * 1)(address)
    pointer = ctypes.addressof(arguments)
    threads = 128 * (m["CONSUMERS"] + 1)

    def launch(keep=(p, arguments)):
        stream = torch.cuda.current_stream().cuda_stream
        result = driver.cuLaunchKernel(v.function, grid, 1, 1, threads, 1, 1, v.shared, stream, pointer, 0)
        if int(result[0]) != 0:
            raise RuntimeError(f"{v.label}: {result[0]!r}")

    return launch


def reference(q, k, v, causal, scale=None):
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if causal:
        sq, sk = s.shape[-2:]
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, -1)
    return torch.nan_to_num(torch.softmax(s, -1)) @ v, lse


CHECKS = [  # batch, heads, kv heads, seqlen_q, seqlen_k
    (1, 1, 1, 64, 128), (1, 2, 1, 128, 128), (2, 4, 2, 256, 256), (1, 2, 2, 255, 256), (1, 3, 3, 239, 1),
    (1, 2, 2, 799, 3), (2, 6, 2, 113, 203), (1, 2, 2, 108, 256), (1, 2, 2, 384, 256), (1, 2, 1, 640, 128),
    (3, 40, 40, 1023, 1024), (2, 32, 8, 1024, 1023), (1, 4, 4, 2048, 2048), (1, 1, 1, 1, 1), (1, 2, 2, 1, 777),
]  # fmt: skip


def verify(v: Variant, head_dim: int) -> float:
    """Worst error over torch's own same-dtype error; raises on a wrong result."""
    worst = 0.0
    for index, (b, h, hk, sq, sk) in enumerate(CHECKS):
        for scale_by in (1.0, 8.0, 30.0, "rising"):
            gen = torch.Generator("cuda").manual_seed(index)
            d = head_dim if index % 3 else head_dim - 8
            dt = torch.bfloat16 if v.macros["ELEMENT_BF16"] else torch.float16
            make = lambda hh, s: torch.randn(b, s, hh, d, device="cuda", generator=gen).to(dt).transpose(1, 2)  # noqa: B023,E731
            q, k, x = make(h, sq), make(hk, sk), make(hk, sk)
            if scale_by == "rising":  # each block of keys, from the last to the first, raises the maximum
                k = k.abs() * torch.linspace(30, 0.1, sk, device="cuda", dtype=dt)[:, None]
                q = q.abs()
            else:
                q = q * scale_by
            out = torch.full_like(q, math.nan)
            lse = torch.full((b, h, sq), math.nan, device="cuda")
            launcher(v, q, k, x, out, lse)()
            torch.cuda.synchronize()
            ref, ref_lse = reference(q, k, x, v.macros["CAUSAL"])
            kk, xx = (t.repeat_interleave(h // hk, 1) for t in (k, x))
            s = (q @ kk.transpose(-1, -2)).float() * d**-0.5
            if v.macros["CAUSAL"]:
                s = s.masked_fill(
                    ~torch.ones(sq, sk, dtype=torch.bool, device="cuda").tril(sk - sq), -math.inf
                )
            pt = torch.nan_to_num(torch.softmax(s, -1)).to(dt) @ xx
            error = (out.double() - ref).abs().max().item()
            own = (pt.double() - ref).abs().max().item()
            ulp = ref.abs().max().item() * (2**-8 if dt == torch.bfloat16 else 2**-11)
            finite = torch.isfinite(ref_lse)
            lse_error = (lse.double() - ref_lse)[finite].abs().max().item() if finite.any() else 0.0
            ok = error <= 2 * own + ulp and lse_error < 2e-3 and bool((lse[~finite] == -math.inf).all())
            if not ok or math.isnan(error):
                if any(name.startswith("ABLATE") for name in v.macros):
                    return math.nan  # wrong on purpose
                where = (b, h, hk, sq, sk, d, scale_by)
                raise RuntimeError(
                    f"{v.label} wrong at {where}: error {error:.3g}, torch {own:.3g}, lse {lse_error:.3g}"
                )
            worst = max(worst, error / (own + ulp))
    return worst


def graph_of(call, count: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    return graph


class Watch:
    """Samples the SM clock and the power while others work."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.read = lambda: (
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        )


def race(calls: dict[str, object], seconds_each: float, blocks: int) -> dict[str, float]:
    """Median milliseconds per call, the contestants interleaved block by block."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graphs, counts = {}, {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start.record()
        for _ in range(3):
            call()
        stop.record()
        torch.cuda.synchronize()
        counts[name] = max(1, min(200, int(seconds_each * 1e3 / blocks / (start.elapsed_time(stop) / 3))))
        graphs[name] = graph_of(call, counts[name])
    times: dict[str, list[float]] = {name: [] for name in calls}
    watch = Watch()
    order = list(calls)
    for block in range(blocks + 1):
        for name in order if block % 2 else reversed(order):
            start.record()
            graphs[name].replay()
            stop.record()
            if block == blocks:
                time.sleep(seconds_each / blocks * 0.6)
                CLOCKS[name] = watch.read()
            torch.cuda.synchronize()
            if block:
                times[name].append(start.elapsed_time(stop) / counts[name])
    return {name: statistics.median(t) for name, t in times.items()}


def known_macros() -> set[str]:
    """Every word of the kernel's sources in capitals: a macro that none of them mentions would change nothing."""
    sources = [KERNELS / "attention_hopper.cu", *KERNELS.glob("*/*.cuh"), *KERNELS.glob("*.cuh")]
    return {word for source in sources for word in re.findall(r"\b[A-Z][A-Z0-9_]*\b", source.read_text())}


def variants_of(head_dim: int, causal: int, extra: dict[str, list[dict]]) -> list[Variant]:
    variants = []
    macro_names = known_macros()
    for macros in extra[f"{head_dim}{'c' if causal else 'f'}"]:
        macros = dict(macros)
        options = {key: macros.pop(key) for key in ("l2", "section_full") if key in macros}
        if unknown := sorted(macros.keys() - macro_names):
            raise SystemExit(f"the Hopper kernel has no macro {', '.join(unknown)}; correct --variants")
        full = {**BASE, "HEAD_DIM": head_dim, "CAUSAL": causal, **macros}
        label = "x".join(str(x) for x in (64 * full["CONSUMERS"], full["BLOCK_N"])) + "".join(
            f" {k}={x}" for k, x in {**macros, **options}.items() if k not in ("CONSUMERS", "BLOCK_N")
        )
        variants.append(Variant(label, full, options=options))
    return variants


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--variants", required=True, help="JSON: {'64f': [{macros}], '64c': ..., ...}")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--seconds", type=float, default=0.06)
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    text = args.variants
    spec = json.loads(Path(text).read_text() if text.endswith(".json") else text)
    torch.randn(1, device="cuda")
    groups = []
    for key in spec:
        groups.append(
            (int(key[:-1]), int(key[-1] == "c"), variants_of(int(key[:-1]), int(key[-1] == "c"), spec))
        )
    everything = [v for _, _, vs in groups for v in vs]
    began = time.time()
    with ThreadPoolExecutor(8) as pool:
        built = list(pool.map(lambda v: compile_cubin(v.macros), everything))
    print(f"compiled {len(everything)} in {time.time() - began:.1f} s")
    for v, (cubin, log) in zip(everything, built, strict=True):
        v.log = log
        v.load(cubin)
        notes = [line for line in log.splitlines() if "spill" in line or "C75" in line]
        if any("C75" in n or " 0 bytes spill" not in n for n in notes):
            print(v.macros, notes)
    results = []
    for head_dim, causal, vs in groups:
        good = []
        for v in vs:
            try:
                worst = 0.0 if args.no_check else verify(v, head_dim)
                mask = "causal" if causal else "full"
                print(f"D{head_dim} {mask} {v.label}: ok, worst {worst:.2f} of torch's error", flush=True)
                good.append(v)
            except RuntimeError as error:
                print(f"FAIL D{head_dim} {'causal' if causal else 'full'} {error}", flush=True)
                if "ILLEGAL" in str(error) or "LAUNCH_FAILED" in str(error) or "CUDA error" in str(error):
                    return 1
        table: dict[str, list[float]] = {}
        lengths = [int(x) for x in args.lengths.split(",")]
        for s in lengths:
            b, h = 16384 // s, 2048 // head_dim
            q, k, x = (torch.randn(b, h, s, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            calls = {}

            def cudnn(q=q, k=k, x=x):
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, x, is_causal=bool(causal))  # noqa: B023

            calls["cudnn"] = cudnn
            out = torch.empty_like(q)
            for v in good:
                calls[v.label] = launcher(v, q, k, x, out)
            times = race(calls, args.seconds, 6)
            flops = 4 * b * h * s * s * head_dim / (2 if causal else 1)
            for name, ms in times.items():
                table.setdefault(name, []).append(flops / ms / 1e9)
                results.append({"head_dim": head_dim, "causal": causal, "seqlen": s, "name": name, "ms": ms})
        print(f"--- D={head_dim} {'causal' if causal else 'full'}: TFLOP/s at {args.lengths}")
        for name, row in table.items():
            ratio = statistics.geometric_mean([a / c for a, c in zip(row, table["cudnn"], strict=True)])
            clock, power = CLOCKS[name]
            print(
                f"{name:44s} "
                + " ".join(f"{x:6.0f}" for x in row)
                + f"   x{ratio:.3f} {clock} MHz {power:.0f} W",
                flush=True,
            )
    if args.output:
        Path(args.output).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
