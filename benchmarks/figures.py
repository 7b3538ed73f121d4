"""The CPU figures that `cudadent42 run` does not measure, as one JSON file for docs/figures.md.

    PYTHONPATH=src python benchmarks/figures.py --output FOLDER/figures.json [--only import,build] \\
        [--control-runs 20] [--setup]

Without --only: import, build, errors, peak; control where --control-runs is given, setup where --setup is. A file
that exists is added to if it is of the same source and machine. tools/update_figures.py reads what is written.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from cudadent42.base.errors import LabError, UsageError
from cudadent42.base.files import write_json
from cudadent42.correctness.norms import error_norms
from cudadent42.correctness.truth import find_truth
from cudadent42.decisions.compare import compare
from cudadent42.model.cases import Case
from cudadent42.model.events import Event, Progress
from cudadent42.model.records import Verdict, VerifyReport
from cudadent42.operations import numerics
from cudadent42.operations.interface import Inputs
from cudadent42.plan import Choices, make_case, make_plan
from cudadent42.registry import get, registry
from cudadent42.suites.loader import DType, load_suite
from cudadent42.timing.cpu_peaks import measure_cpu_peaks, peaks_library
from cudadent42.worker.parent import Worker
from cudadent42.worker.stages import run_stage

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 15
"""Fresh processes per median."""
COLD_BUILDS = 3
PEAK_CASE = "seq-2048"
PEAK_ROUNDS = 100
PEAK_WARM_UP_S = 1.0
LOOK_S = 1e-4
"""Of multiply-adds before each call."""
SEED = 0

Measured = dict[str, Any]

_IMPORT = """
import time
start = time.perf_counter()
import torch
ready = time.perf_counter()
from flashmoe_science import flash_attention
print((ready - start) * 1e3, (time.perf_counter() - ready) * 1e3)
"""

_FIRST_CALL = """
import time, torch
from flashmoe_science import flash_attention
query = torch.ones(1, 1, 32, 64)
start = time.perf_counter()
flash_attention(query, query, query)
print((time.perf_counter() - start) * 1e3)
"""


def main() -> int:
    """Command line."""
    arguments = _parse()
    parts: dict[str, Callable[[], Measured]] = {
        "import": import_time,
        "build": build_times,
        "errors": errors,
        "peak": peak_shares,
        "control": lambda: control(arguments.control_runs),
        "setup": setup_time,
    }
    default = ["import", "build", "errors", "peak"]
    default += ["control"] * (arguments.control_runs > 0) + ["setup"] * arguments.setup
    chosen = arguments.only.split(",") if arguments.only else default
    try:
        for part in chosen:
            if part not in parts:
                raise UsageError(f"--only: unknown part {part!r}; known are {', '.join(parts)}")
        if "control" in chosen and arguments.control_runs < 1:
            raise UsageError("the part control needs --control-runs of 1 or more")
        document = _opened(arguments.output)
        for part in chosen:
            _say(f"{part} ...")
            document["parts"][part] = parts[part]()
            write_json(arguments.output, document)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument("--only", metavar="PARTS", help="import,build,errors,peak,control,setup")
    parser.add_argument("--control-runs", type=int, default=0, metavar="N", help="A/A measurements in a row")
    parser.add_argument("--setup", action="store_true", help="also the set-up time of a fresh clone")
    return parser.parse_args()


def _opened(path: Path) -> dict[str, Any]:
    """The file's contents if it is of this source and machine, else a new record."""
    document = {**provenance("cpu"), "parts": {}}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for key in ("revision", "machine"):
            if before.get(key) != document[key]:
                raise UsageError(f"{path} has another {key} ({before.get(key)}); write to a new file")
        document["parts"] = before["parts"]
        document["changed_source"] = document["changed_source"] or before["changed_source"]
    return document


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- fresh processes


def import_time() -> Measured:
    """Milliseconds of importing flashmoe_science with its `flash_attention` in a process that has torch, and of
    importing torch before that in the same process: so the two are interleaved."""
    runs = [_floats(_IMPORT, os.environ) for _ in range(PROCESSES + 1)][1:]  # the first one writes bytecode
    torch_ms, own_ms = ([run[i] for run in runs] for i in (0, 1))
    _say(f"  {statistics.median(own_ms):.1f} ms over torch's {statistics.median(torch_ms):.0f} ms")
    return {
        "median_ms": statistics.median(own_ms),
        "all_ms": own_ms,
        "torch_median_ms": statistics.median(torch_ms),
    }


def build_times() -> Measured:
    """Milliseconds from the first call of a fresh process to its result, with an empty cache and a filled one."""
    with tempfile.TemporaryDirectory() as folder:
        cold = [_first_call(Path(folder) / f"cache-{number}") for number in range(COLD_BUILDS)]
        _say(f"  cold {statistics.median(cold) / 1e3:.1f} s")
        warm = [_first_call(Path(folder) / "cache-0") for _ in range(PROCESSES)]
    _say(f"  warm {statistics.median(warm):.1f} ms")
    return {
        "cold_median_ms": statistics.median(cold),
        "warm_median_ms": statistics.median(warm),
        "cold_all_ms": cold,
        "warm_all_ms": warm,
    }


def _first_call(cache: Path) -> float:
    return _floats(_FIRST_CALL, {**os.environ, "FLASHMOE_CACHE_DIR": str(cache)})[0]


def _floats(source: str, environment: Any) -> list[float]:
    """What a fresh Python prints. Its own words about an error go to stderr."""
    environment = {**environment, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


# ---------------------------------------------------------------- in this process


def _inputs(case: Case) -> Inputs:
    inputs: Inputs = numerics(case).input_sets(case, SEED, 1, "cpu")[0]
    return inputs


def errors() -> Measured:
    """Error against float64 over PyTorch's own on the same input, for every shape of the suite in each dtype."""
    ours = get("cudadent42", "attention")
    by_dtype = {}
    for dtype in DType:
        for shape in load_suite("default").shapes:
            case = make_case(shape, dtype.value)
            truth = find_truth(case, _inputs(case))
            own = error_norms(ours.prepare(case, truth.inputs)(), truth.reference)
            theirs = truth.pytorch_error
            by_dtype[case.id] = {"worst_element": own.max / theirs.max, "rms": own.rms / theirs.rms}
    largest = {name: max(case[name] for case in by_dtype.values()) for name in ("worst_element", "rms")}
    _say(f"  largest: worst element {largest['worst_element']:.2f}x, RMS {largest['rms']:.3f}x")
    return {**largest, "cases": by_dtype}


def peak_shares() -> Measured:
    """The kernel's throughput on one large case over the machine's measured peak, fp32 and bf16 calls in turn.

    bf16 is over the fp32 peak on a CPU that has no bf16 products; `peaks_before` then has none either.
    A peak is the best of many looks of 0.1 ms. Where neighbours share the cores no call is as long undisturbed, so one
    such look stands before each call too: ``between`` has their median, and the median of a call's share of its own.
    """
    shape = next(shape for shape in load_suite("default").shapes if shape.name == PEAK_CASE)
    cases = {dtype: make_case(shape, dtype) for dtype in ("fp32", "bf16")}
    ours = get("cudadent42", "attention")
    calls = {dtype: ours.prepare(case, _inputs(case)) for dtype, case in cases.items()}
    stop = time.perf_counter() + PEAK_WARM_UP_S
    while time.perf_counter() < stop:
        for call in calls.values():
            call()
    before = measure_cpu_peaks()
    look = peaks_library().flashmoe_peak_fp32
    look.argtypes, look.restype = (ctypes.c_int, ctypes.c_double), ctypes.c_double
    threads = torch.get_num_threads()
    looks: dict[str, list[float]] = {dtype: [] for dtype in calls}
    seconds: dict[str, list[float]] = {dtype: [] for dtype in calls}
    order = random.Random(SEED)
    for _ in range(PEAK_ROUNDS):
        for dtype in order.sample(list(calls), len(calls)):
            looks[dtype].append(look(threads, LOOK_S) * 1e-9)
            start = time.perf_counter()
            calls[dtype]()
            seconds[dtype].append(time.perf_counter() - start)
    after = measure_cpu_peaks()
    peaks = {name: max(before[name], after[name]) for name in before}
    rates = {dtype: gflops(cases[dtype], statistics.median(seconds[dtype])) for dtype in calls}
    # Of the fp32 peak where the CPU has no products of bf16.
    shares = {
        dtype: rate / peaks.get(f"{dtype}_gflops", peaks["fp32_gflops"]) for dtype, rate in rates.items()
    }
    _say("  " + ", ".join(f"{dtype} {share:.1%} of the peak" for dtype, share in shares.items()))
    between = {
        "fp32_gflops": statistics.median([rate for rates_of in looks.values() for rate in rates_of]),
        "share": {
            dtype: statistics.median(
                gflops(cases[dtype], each) / rate
                for each, rate in zip(seconds[dtype], looks[dtype], strict=True)
            )
            for dtype in calls
        },
    }
    return {
        "case": PEAK_CASE,
        "share": shares,
        "gflops": rates,
        "peaks_before": before,
        "peaks_after": after,
        "between": between,
    }


def gflops(case: Case, seconds: float) -> float:
    """1e9 floating-point operations per second of the two matrix products."""
    return case.flops / seconds * 1e-9


# ---------------------------------------------------------------- the lab itself


def control(runs: int) -> Measured:
    """The baseline against itself on the default suite, at the default margin and repeats, `runs` times in a row.

    Each run is a bench stage in a worker of its own with a seed of its own, judged by `compare` as the control of
    `cudadent42 run` is; the baseline defines the bounds of verification, so there is nothing to verify.
    """
    plan = make_plan(Choices(), "cpu", registry)
    called: list[str] = []
    cases, decided, seconds = 0, dict.fromkeys((verdict.value for verdict in Verdict), 0), []
    for seed in range(runs):
        alone = replace(plan, implementations=(plan.baseline,), seed=seed)
        start = time.monotonic()
        with Worker() as worker:
            benched = run_stage("bench", alone, on_event=_ignore, verified=VerifyReport(()), worker=worker)
        seconds.append(time.monotonic() - start)
        comparisons = compare(alone, benched.samples, benched.skipped, {}).control
        cases += len(comparisons)
        for each in comparisons:
            decided[each.verdict.value] += 1
            if each.verdict in (Verdict.FASTER, Verdict.SLOWER):
                called.append(f"run {seed}: {each.name}/{each.dtype} {each.verdict.value} {each.speedup:.4f}")
        _say(f"  run {seed + 1} of {runs}: {len(called)} of {cases} called so far, {seconds[-1]:.0f} s")
    return {
        "runs": runs,
        "cases": cases,
        "called": len(called),
        "called_share": len(called) / cases,
        "which": called,
        "verdicts": decided,
        "margin": plan.margin,
        "repeats": plan.repeats,
        "seconds": seconds,
    }


def _ignore(event: Event) -> None:
    """The samples are in the stage's report; only what is odd is shown."""
    if not isinstance(event, Progress) and hasattr(event, "reason"):
        _say(f"  {event}")


def setup_time() -> Measured:
    """Seconds of `./run.sh --help` in a fresh clone of the committed source, pip's packages already downloaded: a
    set-up in a first clone fills pip's cache, one in a second clone is timed."""
    with tempfile.TemporaryDirectory() as folder:
        first = _set_up(Path(folder) / "first")
        _say(f"  {first:.0f} s with what pip had")
        timed = _set_up(Path(folder) / "second")
    _say(f"  {timed:.0f} s with all packages downloaded")
    return {"seconds": timed, "first_seconds": first}


def _set_up(clone: Path) -> float:
    unset = ("CUDADENT42_PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    start = time.monotonic()
    subprocess.run(
        [str(clone / "run.sh"), "--help"], cwd=clone, env=environment, stdout=subprocess.DEVNULL, check=True
    )
    return time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
