"""What is read of a committed run folder for a row of docs/figures.md: a value for each bound."""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from cudadent42.base.errors import UsageError
from cudadent42.decisions.compare import compare
from cudadent42.model.records import Comparison
from cudadent42.operations.moe.case import MoeCase
from cudadent42.runs.run_folder import RunFolder, load_run
from cudadent42.stages.report.view import View
from cudadent42.suites.loader import load_suite

FLEET = "fleet.json"


@functools.lru_cache(maxsize=4)
def loaded(folder: Path) -> RunFolder:
    """A run, which a row reads for each of its bounds."""
    return load_run(folder)


def finished(folder: Path) -> View:
    """A run that may be shown: finished, everything in it verified, no case left out."""
    view = View(loaded(folder))
    results = view.run.results
    if results is None or not view.complete or not view.checked or view.failures:
        raise UsageError(f"{folder} is not a finished, verified run; only such a run may be shown")
    if len(results.cases) != len(view.run.plan.cases):
        raise UsageError(f"{folder}: some cases were not timed; only a whole run may be shown")
    return view


def speedups(folder: Path, cells: int) -> list[float]:
    """The candidate's speed-up in each of the run's `cells` cases."""
    results = finished(folder).run.results
    assert results is not None
    if len(results.cases) != cells:
        raise UsageError(f"{folder} has {len(results.cases)} cases; expected {cells}")
    return [case.speedup for case in results.cases]


def mean_and_least(cells: int) -> Callable[[Path], tuple[float, ...]]:
    def read(folder: Path) -> tuple[float, ...]:
        value = speedups(folder, cells)
        return statistics.geometric_mean(value), min(value)

    return read


def against(
    rivals: Sequence[str], cells: int, *, beginnings: tuple[str, ...] = ("",)
) -> Callable[[Path], tuple[float, ...]]:
    """Geometric mean and least of (fastest rival's median latency over the candidate's) by case, of the `cells` cases
    whose names begin so.
    """

    def read(folder: Path) -> tuple[float, ...]:
        ratios = ratios_by_case(folder, rivals, cells, beginnings=beginnings)
        return statistics.geometric_mean(ratios), min(ratios)

    return read


def ratios_by_case(
    folder: Path, rivals: Sequence[str], cells: int, *, beginnings: tuple[str, ...] = ("",)
) -> list[float]:
    """Of a run's `cells` cases whose names begin so: fastest rival's median latency over the candidate's."""
    results = finished(folder).run.results
    assert results is not None
    cases = [case for case in results.cases if case.name.startswith(beginnings)]
    if len(cases) != cells:
        raise UsageError(f"{folder} has {len(cases)} cases; expected {cells}")
    return ratios_to_best(cases, results.others, rivals)


def ratios_to_best(
    candidate: Iterable[Comparison], others: Iterable[Comparison], rivals: Sequence[str]
) -> list[float]:
    """For each of the candidate's cases: the fastest rival's latency over the candidate's.

    Raises UsageError where a rival was not timed on a case: its absence would flatter.
    """
    candidate = list(candidate)
    latency = {(each.name, each.dtype, each.baseline): each.baseline_latency_ms for each in candidate}
    latency |= {(each.name, each.dtype, each.implementation): each.latency_ms for each in others}
    ratios = []
    for case in candidate:
        keys = [(case.name, case.dtype, rival) for rival in rivals]
        missing = [key for key in keys if key not in latency]
        if missing:
            raise UsageError(f"{missing[0][2]} was not timed on {case.name}/{case.dtype}")
        ratios.append(min(latency[key] for key in keys) / case.latency_ms)
    return ratios


def least_of_small(folder: Path) -> tuple[float, ...]:
    """The least speed-up over the small suite's cases, which are the first of the default suite."""
    suite = load_suite("small")
    names = {shape.name for shape in suite.shapes}
    results = finished(folder).run.results
    assert results is not None
    small_speedups = [case.speedup for case in results.cases if case.name in names]
    if len(small_speedups) != len(names) * len(suite.dtypes):
        raise UsageError(
            f"{folder} has {len(small_speedups)} small cases; expected {len(names) * len(suite.dtypes)}"
        )
    return (min(small_speedups),)


def small_alone(folder: Path) -> tuple[float, ...]:
    """The small suite's shapes launched without overlap: least ratio to SDPA, least and most microseconds."""
    measured = json.loads((folder / "round2.json").read_text(encoding="utf-8"))["product"]
    ratios, times = [], []
    for shape in load_suite("small").shapes:
        key = f"({shape.batch},{shape.num_heads},{shape.seqlen_q},{shape.head_dim}) full"
        if key not in measured:
            raise UsageError(f"{folder / 'round2.json'} lacks {key}")
        graph = measured[key]["graph"]
        ratios.append(graph["sdpa"] / graph["alone"])
        times.append(graph["alone"])
    return min(ratios), min(times), max(times)


def memory_beyond_output(folder: Path) -> tuple[float, ...]:
    """Most bytes that a call of the candidate took beyond inputs and output, in MB."""
    run = finished(folder).run
    assert run.results is not None
    output_mb = {
        case.id: 2e-6 * case.batch * case.num_heads * case.seqlen_q * case.head_dim for case in run.plan.cases
    }
    extra = [
        sample.memory_mb - output_mb[sample.case]
        for sample in run.samples
        if sample.implementation == run.results.candidate
    ]
    return (max(extra),)


def against_on(case: str, rivals: Sequence[str]) -> Callable[[Path], tuple[float, ...]]:
    """Fastest rival's median latency over the candidate's on the case of that name."""

    def read(folder: Path) -> tuple[float, ...]:
        results = finished(folder).run.results
        assert results is not None
        of_case = [each for each in results.cases if each.name == case]
        return (statistics.geometric_mean(ratios_to_best(of_case, results.others, rivals)),)

    return read


def against_each(rivals: Sequence[str], *cases: str) -> Callable[[Path], tuple[float, ...]]:
    """The same on each of these cases."""
    return lambda folder: tuple(against_on(case, rivals)(folder)[0] for case in cases)


def field(*keys: str, file: str = "figures.json", scale: float = 1.0) -> Callable[[Path], float]:
    """A number of a benchmark's JSON file, by the keys that lead to it."""

    def read(folder: Path) -> float:
        value: Any = json.loads((folder / file).read_text(encoding="utf-8"))
        for key in keys:
            if key not in value:
                raise UsageError(f"{folder / file} lacks {'.'.join(keys)}")
            value = value[key]
        return float(value) * scale

    return read


def fields(*readers: Callable[[Path], float]) -> Callable[[Path], tuple[float, ...]]:
    return lambda folder: tuple(read(folder) for read in readers)


def part(*keys: str, scale: float = 1.0) -> Callable[[Path], float]:
    return field("parts", *keys, scale=scale)


def on_case(case: str) -> Callable[[Path], tuple[float, ...]]:
    """The candidate's speed-up on the case of that name."""

    def read(folder: Path) -> tuple[float, ...]:
        results = finished(folder).run.results
        assert results is not None
        return tuple(each.speedup for each in results.cases if each.name == case)

    return read


def four_bits(case: str) -> Callable[[Path], tuple[float, ...]]:
    """Of a case with weights of 4 bits: how much longer the same takes in 16, and GB/s of either's weights.

    Of an interrupted run, as its report has it: by the samples that there are.
    """

    def read(folder: Path) -> tuple[float, ...]:
        run = loaded(folder)
        shape = next(each for each in run.plan.cases if each.name == case)
        assert isinstance(shape, MoeCase)
        results = (
            compare(run.plan, run.samples, {}, {}) if run.results is None else finished(folder).run.results
        )
        assert results is not None
        row = next(each for each in results.cases if each.case_id == shape.id)
        weights = min(shape.tokens * shape.top_k, shape.experts) * shape.expert_weights
        stored = weights * (1 / 2 + 2 / shape.group)  # a scale of 16 bits for each group
        return row.speedup, stored / row.latency_ms / 1e6, 2 * weights / row.baseline_latency_ms / 1e6

    return read


def of_measured_peak(case: str) -> Callable[[Path], tuple[float, ...]]:
    """Share of the fp32 peak that the run measured, of the candidate on its case of that name."""

    def read(folder: Path) -> tuple[float, ...]:
        run = finished(folder).run
        assert run.results is not None
        shape = next(each for each in run.plan.cases if each.name == case)
        latency_ms = next(each.latency_ms for each in run.results.cases if each.case_id == shape.id)
        return (shape.flops / latency_ms / 1e6 / run.results.peaks["fp32_gflops"],)

    return read


def peak_share(dtype: str, files: str = "peak.json") -> Callable[[Path], float]:
    """Of runs of benchmarks/figures.py for the peak alone, one in each of ``files``: their median."""
    return _median("parts", "peak", "share", dtype, files=(files,))


def share_between(dtype: str, files: str = "peak.json") -> Callable[[Path], float]:
    """The same, of multiply-adds just before each call."""
    return _median("parts", "peak", "between", "share", dtype, files=(files,))


def decode_share(part: str, dtype: str, way: str = "dense") -> Callable[[Path], float]:
    """Of calls in files of benchmarks/decode_cpu.py: the median of processes, ``part``, ``part-2`` and so on."""
    keys = ("dtypes", dtype, "ways", way, "share_of_median_reading")
    return _median(*keys, files=(f"{part}/decode.json", f"{part}-*/decode.json"))


def _median(*keys: str, files: Sequence[str]) -> Callable[[Path], float]:
    def read(folder: Path) -> float:
        names = [
            path.relative_to(folder).as_posix() for pattern in files for path in sorted(folder.glob(pattern))
        ]
        return statistics.median(field(*keys, file=name)(folder) for name in names)

    return read


def host(*keys: str) -> Callable[[Path], float]:
    return field(*keys, file="host.json")


def moe_memory(folder: Path) -> tuple[float, ...]:
    """Most over the layers. Routing has int32s: one for each slot, one for each expert and one more, one for each
    expert and 2,048 slots, and two tickets. Each piece begins at a multiple of 256 bytes."""
    cases = json.loads((folder / "memory.json").read_text(encoding="utf-8"))["cases"]
    shapes = {shape.name: shape for shape in load_suite("moe").shapes if isinstance(shape, MoeCase)}
    shares = []
    for case in cases:
        shape = shapes[case["case"]]
        slots = shape.tokens * shape.top_k
        pieces = (slots, shape.experts + 1, -(-slots // 2048) * shape.experts, 2)
        routing = sum(-(-4 * piece // 256) * 256 for piece in pieces)
        shares.append(max(0, case["requested_bytes"] - routing) / case["buffers_bytes"])
    return (max(shares),)


def model(case: str) -> Callable[[Path], float]:
    """The library's time over ours, of a case of benchmarks/models.py."""

    def read(folder: Path) -> float:
        cases = json.loads((folder / "models.json").read_text(encoding="utf-8"))["cases"]
        ratios = [each["ratio"]["ratio"] for each in cases if each["case"] == case]
        if not ratios:
            raise UsageError(f"{folder / 'models.json'} lacks {case}")
        return float(ratios[0])

    return read


def compiled(tokens: int) -> Callable[[Path], float]:
    """Eager code's time over that of compiled code, of a length of benchmarks/compiled_stack.py."""

    def read(folder: Path) -> float:
        cases = json.loads((folder / "compiled.json").read_text(encoding="utf-8"))["cases"]
        ratios = [each["ratio"]["ratio"] for each in cases if each["tokens"] == tokens]
        if not ratios:
            raise UsageError(f"{folder / 'compiled.json'} lacks {tokens} tokens")
        return float(ratios[0])

    return read


def tuning(name: str) -> Callable[[Path], float]:
    return field("summary", name, file="tuning.json")


def tuned(name: str) -> Callable[[Path], float]:
    return field("summary", name, file="tuned.json")


def fleet(part: str, name: str) -> Callable[[Path], float]:
    return field(part, name, file=FLEET)


def fleet_has(part: str) -> Callable[[Path], bool]:
    """Whether a folder of benchmarks/fleet.py has this part: its parts may be measured apart."""
    return lambda folder: part in json.loads((folder / FLEET).read_text(encoding="utf-8"))


def fleet_coverage(folder: Path) -> tuple[float, ...]:
    """Least and most, over numbers of machines and how much they differ, of the shares of fleets whose truth the
    interval held."""
    rows = json.loads((folder / FLEET).read_text(encoding="utf-8"))["coverage"]
    shares = [float(row["t"]) for row in rows]
    return min(shares), max(shares)


def fleet_kills(folder: Path) -> tuple[float, ...]:
    """Kills of coordinators and workers, tunings that did not come to their right end after them, and blocks that
    were lost or counted twice."""
    said = json.loads((folder / FLEET).read_text(encoding="utf-8"))["kills"]
    ended = min(said["went_on_to_the_end"], said["right"])
    wrong = said["lost"] + said["blocks_missing"] + said["blocks_twice"]
    return said["coordinators"] + said["workers"], said["tunings"] - ended, wrong


def fleet_of_gpus(folder: Path) -> tuple[float, ...]:
    """Time of a sweep by two devices over that by one, and the share of cases whose winners are not alike."""
    said = json.loads((folder / "fleet-of-gpus.json").read_text(encoding="utf-8"))["summary"]
    return said["whole_ratio"], 1 - said["winners_alike_share"]


def honest(name: str) -> Callable[[Path], float]:
    return field("summary", name, file="honest.json")


def hardened(name: str) -> Callable[[Path], float]:
    return field(name, file="results.json")


def mcp_start(folder: Path) -> tuple[float, ...]:
    """Milliseconds from the start of the process to its answer to the first request."""
    measured = json.loads((folder / "mcp-start.json").read_text(encoding="utf-8"))
    return (1e3 * measured["initialize"]["clock_s"],)


def ledger(name: str) -> Callable[[Path], float]:
    return field("figures", name, file="ledger.json")


def remote(part: str, *keys: str) -> Callable[[Path], float]:
    return field("summary", *keys, file=f"{part}.json")


def first_calls(folder: Path) -> tuple[float, ...]:
    """Milliseconds with the kernel cached (the slower of two processes), seconds without."""
    path = folder / "host.json"
    times = json.loads(path.read_text(encoding="utf-8"))["import_and_first_call_ms"]
    return max(times["cached"][1], times["cached again"][1]), times["not cached"][1] / 1e3


def races(file: str, wanted: str) -> Callable[[Path], tuple[float, ...]]:
    """Of a file of benchmarks/races.py: how many races there are, and the share that ended as ``wanted``."""

    def read(folder: Path) -> tuple[float, ...]:
        rows = json.loads((folder / file).read_text(encoding="utf-8"))["rows"]
        return len(rows), sum(row["verdict"] == wanted for row in rows) / len(rows)

    return read


def false_calls(folder: Path) -> tuple[float, ...]:
    """Races of a version with itself, and the share in which it, or a case, was called faster or slower."""
    rows = json.loads((folder / "same.json").read_text(encoding="utf-8"))["rows"]
    called = [row for row in rows if {row["verdict"], *row["cases"].values()} & {"faster", "slower"}]
    return len(rows), len(called) / len(rows)


def busy(kind: str, word: str) -> Callable[[Path], tuple[float, ...]]:
    """Of a file of benchmarks/busy.py: races of one kind under all loads, and the share that ended as ``word``."""

    def read(folder: Path) -> tuple[float, ...]:
        rows = json.loads((folder / "busy.json").read_text(encoding="utf-8"))["rows"]
        verdicts = [row["verdict"] for row in rows if row["kind"] == kind]
        return len(verdicts), sum(verdict == word for verdict in verdicts) / len(verdicts)

    return read


def prediction_errors(*scripts: str) -> Callable[[Path], tuple[float, ...]]:
    """By how much of each script's time its prediction was off, of a file of benchmarks/predictions.py."""

    def read(folder: Path) -> tuple[float, ...]:
        measured = json.loads((folder / "predictions.json").read_text(encoding="utf-8"))["scripts"]
        return tuple(abs(measured[script]["replay"]["error"]) for script in scripts)

    return read


def bisections(folder: Path) -> tuple[float, ...]:
    rows = json.loads((folder / "bisect.json").read_text(encoding="utf-8"))["rows"]
    return len(rows), sum(row["right"] for row in rows)


def kills(folder: Path) -> tuple[float, ...]:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary["kills"], summary["resumes"], summary["samples_lost"]
