"""Write the tables of docs/figures.md from committed run folders.

    python tools/update_figures.py

Each row reads the newest folder of its kind under benchmarks/results (`<date>-<kind>`, such as
`2026-11-20-h200-hopper`), and says so where there is none. No figure on the page is typed by hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from figure_readers import (  # noqa: E402 (this file may be run, or loaded by its path)
    against,
    against_on,
    bisections,
    false_calls,
    fields,
    first_calls,
    host,
    kills,
    least_of_small,
    ledger,
    mean_and_least,
    memory_beyond_output,
    moe_memory,
    part,
    races,
    remote,
    small_alone,
)

from cudadent42.base.errors import LabError, UsageError  # noqa: E402
from cudadent42.runs.run_folder import load_run  # noqa: E402

PAGE = ROOT / "docs" / "figures.md"
RESULTS = ROOT / "benchmarks" / "results"
NOTHING_YET = "not measured yet"
OVERRIDE_VARIABLE = "FLASHMOE_CUDA_KERNEL"


@dataclass(frozen=True)
class Bound:
    """One figure of a row and what is asked of it."""

    name: str
    limit: float | None
    """None where nothing is asked; the figure is shown all the same."""
    show: Callable[[float], str]
    at_least: bool = False

    def holds(self, value: float) -> bool:
        if self.limit is None:
            return True
        return value >= self.limit if self.at_least else value <= self.limit

    def text(self, value: float, sign: str = "") -> str:
        return f"{self.name} {sign}{self.show(value)}".strip()

    @property
    def asked(self) -> str:
        return "" if self.limit is None else self.text(self.limit, "≥ " if self.at_least else "≤ ")


@dataclass(frozen=True)
class Row:
    """One line of a table: what was asked and where what was reached is read."""

    what: str
    kind: str
    """Of run folder: ``cpu-default`` for ``benchmarks/results/<date>-cpu-default``."""
    bounds: tuple[Bound, ...]
    read: Callable[[Path], tuple[float, ...]]
    """The folder's value for each bound."""
    kernel: str = ""
    """The CUDA kernel that the run must have been held to, where the choice among them would take another."""


# ---------------------------------------------------------------- what was asked


def ratio(value: float) -> str:
    return f"{value:.2f}×"


def share(value: float) -> str:
    return f"{value * 100:.3g} %"


def unit(name: str) -> Callable[[float], str]:
    return lambda value: f"{0.0 if abs(value) < 1e-9 else value:.3g} {name}".strip()


def mean(limit: float) -> Bound:
    return Bound("geometric mean", limit, ratio, at_least=True)


def least(limit: float | None = None) -> Bound:
    return Bound("least", limit, ratio, at_least=True)


CUDNN, FLASH_ATTENTION_4 = "pytorch_cudnn", "flash_attn_cute"

TABLES: dict[str, tuple[Row, ...]] = {
    "cpu": (
        Row(
            "speed-up over PyTorch SDPA, the suite's 24 cells (fp16 and bf16)",
            "cpu-default",
            (mean(4.0), least(2.0)),
            mean_and_least(24),
        ),
        Row("the same shapes in fp32", "cpu-fp32", (mean(2.2), least(1.6)), mean_and_least(12)),
        Row(
            "(1, 8, 2048, 64) full: share of the machine's measured peak",
            "cpu-figures",
            (Bound("fp32", 0.8, share, at_least=True), Bound("bf16", 0.7, share, at_least=True)),
            fields(part("peak", "share", "fp32"), part("peak", "share", "bf16")),
        ),
        Row(
            "error against float64 over PyTorch's own, the suite's shapes in fp16, bf16 and fp32",
            "cpu-figures",
            (Bound("worst element", 2.0, ratio), Bound("RMS", 1.15, ratio)),
            fields(part("errors", "worst_element"), part("errors", "rms")),
        ),
        Row(
            "A/A control: cases of the suite called faster or slower than themselves, default margin",
            "cpu-figures",
            (Bound("runs", 20, unit(""), at_least=True), Bound("called", 0.05, share)),
            fields(part("control", "runs"), part("control", "called_share")),
        ),
        Row(
            "`import flashmoe_science` over importing torch",
            "cpu-figures",
            (Bound("", 50, unit("ms")),),
            fields(part("import", "median_ms")),
        ),
        Row(
            "first call of a process: the kernel built, and loaded from the cache",
            "cpu-figures",
            (Bound("cold", 30, unit("s")), Bound("warm", 20, unit("ms"))),
            fields(part("build", "cold_median_ms", scale=1e-3), part("build", "warm_median_ms")),
        ),
        Row(
            "set-up by `./run.sh` in a fresh clone, packages already downloaded",
            "cpu-figures",
            (Bound("", 180, unit("s")),),
            fields(part("setup", "seconds")),
        ),
    ),
    "h200": (
        Row(
            "Hopper kernel against cuDNN, the 36 cells of the suite `hopper`, GPU time",
            "h200-hopper",
            (mean(1.0), least(0.85)),
            against([CUDNN], 36),
        ),
        Row(
            "the same against the better of cuDNN and FlashAttention-4 in each cell",
            "h200-hopper",
            (mean(0.88), least()),
            against([CUDNN, FLASH_ATTENTION_4], 36),
        ),
        Row(
            "portable kernel against PyTorch's FlashAttention-2, the 24 cells of the suite `portable`, GPU time",
            "h200-portable",
            (mean(1.0), least()),
            mean_and_least(24),
            kernel="portable",
        ),
        Row(
            "the default suite's six small shapes, fp16 and bf16, against SDPA's choice, GPU time; consecutive "
            "launches overlap (programmatic dependent launch)",
            "h200-default-graph",
            (least(1.7),),
            least_of_small,
        ),
        Row(
            "the same shapes in bf16 with each launch alone, without that overlap (`round2.json`)",
            "h200-small-variants",
            (least(), Bound("shortest", None, unit("µs")), Bound("longest", None, unit("µs"))),
            small_alone,
        ),
        Row(
            "the six small shapes, events around each call", "h200-small-call", (least(1.7),), least_of_small
        ),
        Row(
            "decode of 1 to 8 sequences with 2048 to 131072 keys, the 33 cells of the suite `decode`, against the "
            "fastest of SDPA's choice, cuDNN and its FlashAttention in each cell, GPU time",
            "h200-decode-split",
            (Bound("geometric mean", None, ratio, at_least=True), least()),
            against(["pytorch", CUDNN, "pytorch_flash"], 33),
        ),
        Row(
            "gradients of attention, deterministic, against the best of cuDNN, PyTorch's FlashAttention-2 and "
            "FlashAttention-4 in each of the 36 cells of the suite `backward`, GPU time",
            "h200-backward",
            (mean(1.0), least(0.9)),
            against(["pytorch", CUDNN, "pytorch_flash", FLASH_ATTENTION_4], 36),
        ),
        Row(
            "the same against cuDNN",
            "h200-backward",
            (mean(1.1), least(1.1)),
            against(["pytorch", CUDNN], 36),
        ),
        Row(
            "host time per call, steady state",
            "h200-host",
            (Bound("", 9, unit("µs")),),
            fields(host("host_us", "flash_attention")),
        ),
        Row(
            "first call in a process: kernel cached, and not cached",
            "h200-host",
            (Bound("cached", 50, unit("ms")), Bound("not cached", 3, unit("s"))),
            first_calls,
        ),
        Row(
            "device memory of a call beyond inputs and output, the 36 cells",
            "h200-hopper",
            (Bound("", 0, unit("MB")),),
            memory_beyond_output,
        ),
    ),
    "moe": (
        Row(
            "the whole call against the fastest of eager `grouped_mm`, the same compiled, and Liger; 7 layers",
            "h200-moe",
            (mean(1.25), least(1.0)),
            against(["grouped_mm", "grouped_mm_compiled", "liger"], 7),
        ),
        Row(
            "GPU time alone against the faster `grouped_mm`; Liger waits for the GPU, so it has no such time",
            "h200-moe-queue",
            (mean(1.25), least(1.0)),
            against(["grouped_mm", "grouped_mm_compiled"], 7),
        ),
        Row(
            "the same, a single token (aim)",
            "h200-moe-queue",
            (Bound("", 3.0, ratio, at_least=True),),
            against_on("qwen3-30b-1", ["grouped_mm", "grouped_mm_compiled"]),
        ),
        Row(
            "memory that a call asks for beyond output and routing's integers, over one (tokens · k, intermediate) and "
            "one (tokens · k, hidden) buffer; 14 layers",
            "h200-moe-memory",
            (Bound("most", 1.0, ratio),),
            moe_memory,
        ),
        Row(
            "on CPU against PyTorch's loop over the experts, the 16 cells of the suite `moe-cpu`",
            "cpu-moe",
            (mean(1.0), least(1.0)),
            mean_and_least(16),
        ),
    ),
    "lab": (
        Row(
            "races of a version against itself on a 2-core machine that others use, called different",
            "cpu-races",
            (Bound("races", 200, unit(""), at_least=True), Bound("called", 0.05, share)),
            false_calls,
        ),
        Row(
            "races against a kernel made 3 % slower on purpose, called slower",
            "cpu-races",
            (Bound("races", 60, unit(""), at_least=True), Bound("found", 0.95, share, at_least=True)),
            races("slower.json", "slower"),
        ),
        Row(
            "bisections of 16 commits with one slowdown of 10 %",
            "cpu-races",
            (Bound("runs", 20, unit(""), at_least=True), Bound("right", 19, unit(""), at_least=True)),
            bisections,
        ),
        Row(
            "`kill -9` at a random moment of a session",
            "session-kill",
            (
                Bound("kills", 100, unit(""), at_least=True),
                Bound("resumes", 100, unit(""), at_least=True),
                Bound("samples lost", 0, unit("")),
            ),
            kills,
        ),
        Row(
            "the ledger of run folders with a million samples, from the command line",
            "cpu-ledger-scale",
            (
                Bound("samples", 1e6, lambda value: f"{value:,.0f}", at_least=True),
                Bound("opened and listed", 1, unit("s")),
                Bound("rebuilt", 60, unit("s")),
            ),
            fields(ledger("samples"), ledger("list_s"), ledger("rebuild_s")),
        ),
        Row(
            "a bare Debian without Python, pip and compiler to `Preflight OK`, unattended; again: the slowest of five",
            "remote",
            (Bound("first", 300, unit("s")), Bound("again", 5, unit("s"))),
            fields(remote("bootstrap", "slowest_first_s"), remote("bootstrap", "slowest_second_s")),
        ),
        Row(
            "a run elsewhere over SSH, loopback, warm: beyond the run itself, medians",
            "remote",
            (Bound("shared connection", 3, unit("s")), Bound("new connection", 3, unit("s"))),
            fields(remote("overhead", "shared", "overhead_s"), remote("overhead", "new", "overhead_s")),
        ),
        Row(
            "the connection cut at a random moment of sending, bootstrap, run or fetching",
            "remote",
            (
                Bound("cuts", 50, unit(""), at_least=True),
                Bound("whole run folders back", 50, unit(""), at_least=True),
                Bound("processes left there", 0, unit("")),
            ),
            fields(
                remote("cuts", "cuts"),
                remote("cuts", "folders_brought_back"),
                remote("cuts", "processes_left_there"),
            ),
        ),
        Row(
            "hostile host, path, case and branch names",
            "remote",
            (Bound("names", 200, unit(""), at_least=True), Bound("executed", 0, unit(""))),
            fields(remote("names", "names"), remote("names", "executed")),
        ),
    ),
}


# ---------------------------------------------------------------- the page


def newest(kind: str, results: Path) -> Path | None:
    """The newest ``<date>-<kind>``; folders start with their date."""
    return max(results.glob(f"[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-{kind}"), default=None)


def doubt(row: Row, folder: Path) -> str:
    """What the folder does not prove about the kernel that ran."""
    if not row.kernel or load_run(folder).manifest.environment.get(OVERRIDE_VARIABLE) == row.kernel:
        return ""
    return f", which does not record `{OVERRIDE_VARIABLE}={row.kernel}`"


def line(row: Row, results: Path) -> str:
    """One line of a table."""
    asked = ", ".join(bound.asked for bound in row.bounds if bound.asked)
    folder = newest(row.kind, results)
    if folder is None:
        return f"| {row.what} | {asked} | {NOTHING_YET} | |"
    values = row.read(folder)
    if not all(math.isfinite(value) for value in values):
        raise UsageError(f"{folder}: not a finite figure for {row.what!r}")
    parts = []
    for bound, value in zip(row.bounds, values, strict=True):
        parts.append(bound.text(value) + ("" if bound.holds(value) else " (**not reached**)"))
    source = f"[{folder.name}](../benchmarks/results/{folder.name}){doubt(row, folder)}"
    return f"| {row.what} | {asked} | {', '.join(parts)} | {source} |"


def updated(page: str, results: Path = RESULTS) -> str:
    """The page with what is between each table's markers exchanged."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise UsageError(f"the page lacks {begin} or {end}; put them around the table")
        head = ["| what | asked | reached | run folder |", "| --- | --- | --- | --- |"]
        table = "\n".join([begin, *head, *(line(row, results) for row in rows), end])
        page = before + table + after
    return page


def main() -> int:
    """Command line."""
    try:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
