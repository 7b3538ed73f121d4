"""A run as it might have been, made of records: the reports' input. None of its numbers was measured."""

from __future__ import annotations

import math
import random
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cudadent42.model.records import (
    BuildReport,
    Check,
    Comparison,
    ErrorNorms,
    MachineReport,
    Plan,
    Results,
    Sample,
    Status,
    Verdict,
    VerifiedCase,
    VerifyReport,
)
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.runs import run_folder
from cudadent42.runs.run_folder import Manifest, RunFolder, RunStatus
from cudadent42.runs.source import Revision
from flashmoe_science.jit.records import KernelBuild, Recipe, Resources

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that tests here share

SHAPES = (
    ("tiny", 1, 1, 32, 64, False),
    ("small", 1, 1, 64, 64, False),
    ("medium", 1, 1, 128, 64, False),
    ("large", 1, 1, 256, 64, False),
    ("xlarge", 1, 1, 512, 64, False),
    ("multihead", 2, 4, 128, 64, False),
    ("heads8-512", 1, 8, 512, 64, False),
    ("heads8-1024", 1, 8, 1024, 64, False),
    ("heads8-2048", 1, 8, 2048, 64, False),
    ("heads8-2048-causal", 1, 8, 2048, 64, True),
    ("heads16-1024-causal", 1, 16, 1024, 128, True),
    ("batch4-512", 4, 8, 512, 64, False),
)
ADVERSARIAL = ("large_logits", "dominant_key", "equal_rows", "rising_maximum", "nan", "inf", "empty_keys")


@dataclass(frozen=True)
class Recipe42:
    """What kind of run to make."""

    dtypes: tuple[str, ...] = ("fp16", "bf16")
    names: tuple[str, ...] = ()
    """Names of the cases; the default suite's where empty."""
    implementations: tuple[str, ...] = ("pytorch", "cudadent42")
    device: str = "cpu"
    speed: float = 4.3
    """Typical speed-up of the first implementation that is not the baseline."""
    repeats: int = 25
    seed: int = 7


def make_run(path: Path, kind: Recipe42 = Recipe42()) -> RunFolder:
    """A complete, successful run."""
    generator = random.Random(kind.seed)
    cases = tuple(_cases(kind))
    baseline, *candidates = kind.implementations
    plan = Plan(
        suite="default",
        device=kind.device,
        cases=cases,
        baseline=baseline,
        implementations=kind.implementations,
        repeats=kind.repeats,
        warmup=3,
        seed=42,
    )
    samples: list[Sample] = []
    compared: dict[str, list[Comparison]] = {name: [] for name in (*candidates, f"{baseline}_control")}
    clock = 0.0
    for case in cases:
        typical = 0.004 + case.flops / 1.6e8
        factor = {baseline: 1.0, f"{baseline}_control": 1.0}
        for number, name in enumerate(candidates):
            factor[name] = 1 / (kind.speed ** (1 / (1 + number)) * generator.uniform(0.6, 1.5))
        series: dict[str, list[float]] = {name: [] for name in factor}
        for block in range(kind.repeats):
            order = list(factor)
            generator.shuffle(order)
            drift = 1 + 0.01 * math.sin(block / 6)
            for position, name in enumerate(order):
                spike = generator.choice([1.0] * 29 + [1.6])
                latency = typical * factor[name] * drift * generator.lognormvariate(0, 0.008) * spike
                clock += latency / 1e3
                flags = "preempted" if spike > 1 else ""
                samples.append(Sample(case.id, name, block, position, latency, 1, math.nan, clock, flags))
                series[name].append(latency)
        base = statistics.median(series[baseline])
        for name, comparisons in compared.items():
            median = statistics.median(series[name])
            comparisons.append(_comparison(case, name, baseline, base / median, median, base, kind.repeats))
    candidate = candidates[0]
    speeds = [c.speedup for c in compared[candidate]]
    mean = statistics.geometric_mean(speeds)
    control = compared[f"{baseline}_control"]
    return RunFolder(
        path=path,
        manifest=Manifest(
            schema_version=run_folder.SCHEMA_VERSION,
            version="0.1.0",
            status=RunStatus.FINISHED,
            error="",
            command=("cudadent42", "run", "--output-dir", "runs/a b"),
            started="2026-11-20T10:00:00.000+00:00",
            ended="2026-11-20T10:01:17.250+00:00",
            plan=plan,
            machine=_machine(kind),
            build=_build(kind),
            revision=Revision("0123456789abcdef0123456789abcdef01234567", "main", False, "", ()),
            environment={"OMP_NUM_THREADS": "2"},
        ),
        samples=tuple(samples),
        verify=VerifyReport(tuple(_verified(cases, candidates, generator))),
        results=Results(
            baseline=baseline,
            candidate=candidate,
            speedup_geomean=mean,
            speedup_geomean_ci_low=mean * 0.993,
            speedup_geomean_ci_high=mean * 1.008,
            verdict=_verdict(mean * 0.993, mean * 1.008),
            margin=plan.margin,
            noise_floor=max(abs(c.speedup - 1) for c in control),
            cases=tuple(compared[candidate]),
            others=tuple(c for name in candidates[1:] for c in compared[name]),
            control=tuple(control),
            peaks={"fp32_gflops": 516.0, "bf16_gflops": 1032.0, "copy_gbps": 38.0}
            if kind.device == "cpu"
            else {},
        ),
    )


def _cases(kind: Recipe42) -> list[AttentionCase]:
    shapes = [(*SHAPES[i % len(SHAPES)],) for i in range(len(kind.names) or len(SHAPES))]
    names = kind.names or tuple(shape[0] for shape in SHAPES)
    return [
        AttentionCase(name, dtype, batch, heads, heads, length, length, dim, causal)
        for dtype in kind.dtypes
        for name, (_, batch, heads, length, dim, causal) in zip(names, shapes, strict=True)
    ]


def _verdict(low: float, high: float, margin: float = 0.01) -> Verdict:
    if low > 1 + margin:
        return Verdict.FASTER
    if high < 1 - margin:
        return Verdict.SLOWER
    return Verdict.EQUAL if low >= 1 - margin and high <= 1 + margin else Verdict.UNDECIDED


def _comparison(
    case: AttentionCase, name: str, baseline: str, speedup: float, median: float, base: float, blocks: int
) -> Comparison:
    low, high = speedup * 0.994, speedup * 1.005
    return Comparison(
        case.name, case.dtype, name, baseline, speedup, low, high, _verdict(low, high), median, base, blocks
    )


def _verified(
    cases: tuple[AttentionCase, ...], names: list[str], generator: random.Random
) -> list[VerifiedCase]:
    verified = []
    for name in names:
        for case in cases:
            reference = ErrorNorms(*(generator.uniform(2, 4) * scale for scale in (1e-3, 1e-4, 3e-4)))
            bound = ErrorNorms(2 * reference.max, 2 * reference.rms, 2 * reference.worst_row)
            error = ErrorNorms(
                reference.max * generator.uniform(0.6, 1.3),
                reference.rms * generator.uniform(0.7, 1.05),
                reference.worst_row * generator.uniform(0.6, 1.2),
            )
            verified.append(VerifiedCase(case.id, name, "random", error, reference, bound, True))
        for dtype in dict.fromkeys(case.dtype for case in cases):
            for kind in ADVERSARIAL:
                if kind in ("nan", "inf", "empty_keys"):
                    verified.append(
                        VerifiedCase(f"{kind}/{dtype}", name, kind, None, None, None, True, "as expected")
                    )
                else:
                    norms = ErrorNorms(2e-3, 3e-4, 5e-4)
                    bound = ErrorNorms(6e-3, 7e-4, 9e-4)
                    verified.append(VerifiedCase(f"{kind}/{dtype}", name, kind, norms, norms, bound, True))
    return verified


def _machine(kind: Recipe42) -> MachineReport:
    gpu = kind.device != "cpu"
    name = "NVIDIA H200" if gpu else "Example CPU 9000"
    return MachineReport(
        checks=(
            Check("python", Status.OK, "3.11.2"),
            Check("torch", Status.OK, "2.13.0"),
            Check("compiler", Status.SKIP if gpu else Status.OK, "g++ 12.2.0"),
            Check("disk", Status.OK, "51 GB free"),
        ),
        summary=f"torch=2.13.0 cuda={'13.0' if gpu else 'none'} dev={name}",
        facts={
            "cpu_model": "Example CPU 9000",
            "physical_cores": 2,
            "memory_gb": 15.6,
            "kernel": "Linux 6.1",
            "python": "3.11.2",
            "torch": "2.13.0",
            "gpu": name if gpu else None,
        },
    )


def _build(kind: Recipe42) -> BuildReport:
    gpu = kind.device != "cpu"
    kernels = []
    for dtype in kind.dtypes:
        recipe = Recipe(
            kernel="attention_forward",
            backend="nvrtc" if gpu else "host",
            architecture="sm_90a" if gpu else "x86_64+avx2+avx512f+avx512_bf16",
            configuration={"dtype": dtype, "head_dim": 64} if gpu else {},
            compiler="nvrtc" if gpu else "/usr/bin/g++",
            compiler_version="13.0.88" if gpu else "g++ (Debian 12.2.0-14) 12.2.0",
            flags=("-O3", "-std=c++17"),
            sources={"attention.cu" if gpu else "attention.cpp": "ab" * 32},
        )
        resources = Resources(168, 0, 0, 0, 1024, 163840, 384, 1, 0.1875) if gpu else None
        artifact = Path("cache") / "kernel"
        kernels.append(KernelBuild(recipe, "cd" * 32, artifact, 183_000, 4.71, False, "", resources))
    return BuildReport(tuple(kernels if gpu else kernels[:1]))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A complete run with the default suite on a CPU, in a folder that exists."""
    return make_run(tmp_path)


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The same, for tests that change nothing of it."""
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def small(tmp_path: Path) -> RunFolder:
    """A complete run of three cases."""
    return make_run(tmp_path, Recipe42(names=("tiny", "small", "large"), dtypes=("fp16",)))


@pytest.fixture
def make(tmp_path: Path):  # type: ignore[no-untyped-def]
    """``make(dtypes=..., ...)``: a run of another kind."""

    def of(**changes: object) -> RunFolder:
        return make_run(tmp_path, replace(Recipe42(), **changes))  # type: ignore[arg-type]

    return of
