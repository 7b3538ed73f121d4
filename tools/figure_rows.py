"""The rows of docs/figures.md: what was asked, and where what was reached is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from figure_readers import (
    against,
    against_on,
    bisections,
    busy,
    compiled,
    decode_share,
    false_calls,
    fields,
    first_calls,
    fleet,
    fleet_coverage,
    fleet_has,
    fleet_kills,
    hardened,
    honest,
    host,
    kills,
    least_of_small,
    ledger,
    mcp_start,
    mean_and_least,
    memory_beyond_output,
    model,
    moe_memory,
    on_case,
    part,
    peak_share,
    prediction_errors,
    races,
    remote,
    share_between,
    small_alone,
    tuned,
    tuning,
)
from figure_serving import (
    from_batch,
    host_us,
    least_alone,
    least_of,
    least_rate,
    mean_of,
    most_at_best,
    most_of_queries,
    most_over_dense,
    most_us_alone,
    of_cases,
    share_of_peak,
)


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
    among: Callable[[Path], bool] = lambda folder: True
    """Which folders of the kind have what is read, where it is measured in parts."""


# ---------------------------------------------------------------- what was asked


def ratio(value: float) -> str:
    return f"{value:.2f}×"


def share(value: float) -> str:
    return f"{value * 100:.3g} %"


def thousandths(value: float) -> str:
    return f"{value:.3f}×"


def unit(name: str) -> Callable[[float], str]:
    return lambda value: f"{0.0 if abs(value) < 1e-9 else value:.3g} {name}".strip()


def mean(limit: float) -> Bound:
    return Bound("geometric mean", limit, ratio, at_least=True)


def least(limit: float | None = None) -> Bound:
    return Bound("least", limit, ratio, at_least=True)


SHORT_PROMPTS = "32x512 16/16"
OURS = "pages of 64"
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
            "the suite's 24 cells with both sides held to AVX2",
            "cpu-avx2",
            (mean(2.6), least(1.3)),
            mean_and_least(24),
        ),
        Row(
            "the same on a processor that has AVX2 alone, a Zen 3, on cores that neighbours share",
            "cpu-zen3-avx2",
            (mean(2.6), least(1.3)),
            mean_and_least(24),
        ),
        *(
            Row(
                f"the suite's 24 cells on a Xeon with AMX, {threads} threads, PyTorch with oneDNN's AMX",
                f"cpu-amx-{threads}",
                (mean(1.2), least(1.0)),
                mean_and_least(24),
            )
            for threads in (2, 16)
        ),
        Row(
            "(1, 8, 2048, 64) full, held to AVX2: share of the machine's measured fp32 peak",
            "cpu-avx2-peak",
            (Bound("fp32", 0.8, share, at_least=True), Bound("bf16", 0.8, share, at_least=True)),
            fields(peak_share("fp32"), peak_share("bf16")),
        ),
        Row(
            "the same on a Zen 3, on cores that neighbours share",
            "cpu-zen3-avx2-peak",
            (Bound("fp32", 0.8, share, at_least=True), Bound("bf16", 0.8, share, at_least=True)),
            fields(peak_share("fp32"), peak_share("bf16")),
        ),
        Row(
            "there, as shares of what multiply-adds reached just before each call, medians",
            "cpu-zen3-avx2-peak",
            (Bound("fp32", None, share), Bound("bf16", None, share)),
            fields(share_between("fp32"), share_between("bf16")),
        ),
        Row(
            "(1, 8, 2048, 64) full: share of the machine's measured peak",
            "cpu-peak",
            (Bound("fp32", 0.8, share, at_least=True), Bound("bf16", 0.7, share, at_least=True)),
            fields(peak_share("fp32"), peak_share("bf16")),
        ),
        Row(
            "decode, one sequence of 32,768 keys on all cores: share of reading the same memory in order, median run",
            "cpu-decode",
            tuple(
                Bound(f"{name} {dtype}", 0.8, share, at_least=True)
                for name in ("AVX-512", "AVX2")
                for dtype in ("fp16", "bf16", "fp32")
            ),
            fields(
                *(
                    decode_share(folder, dtype)
                    for folder in ("avx512", "avx2")
                    for dtype in ("fp16", "bf16", "fp32")
                )
            ),
        ),
        Row(
            "the same on a Zen 3, which has AVX2 alone",
            "cpu-zen3-decode",
            tuple(Bound(dtype, 0.8, share, at_least=True) for dtype in ("fp16", "bf16", "fp32")),
            fields(*(decode_share("avx2", dtype) for dtype in ("fp16", "bf16", "fp32"))),
        ),
        Row(
            "the same on the 16 cores of a Xeon with AMX",
            "cpu-amx-decode",
            tuple(Bound(dtype, 0.8, share, at_least=True) for dtype in ("fp16", "bf16", "fp32")),
            fields(*(decode_share("amx", dtype) for dtype in ("fp16", "bf16", "fp32"))),
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
            "forward and backward pass as a training step calls them, launches included, against the best of the same "
            "in each of the 36 cells of the suite `training-step`",
            "h200-training-step",
            (mean(1.05), least()),
            against(["pytorch", CUDNN, "pytorch_flash", FLASH_ATTENTION_4], 36),
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
    "serving": (
        Row(
            "decode over pages of 64 with at least 0.5 GB of keys and values: rate, and time over dense",
            "h200-serving",
            (
                Bound("least", 4.2, unit("TB/s"), at_least=True),
                Bound("most", 1.03, ratio),
            ),
            fields(least_rate(64), most_over_dense(64)),
        ),
        Row(
            "the same over pages of 16 and of 1, time over dense",
            "h200-serving",
            (Bound("16", 1.05, ratio), Bound("1", 1.15, ratio)),
            fields(most_over_dense(16), most_over_dense(1)),
        ),
        Row(
            "decode over pages of 64 against FlashAttention-3, {1, 8, 64} sequences of {1k, 8k, 32k} keys",
            "h200-serving",
            (mean(1.25), Bound("least", 1.0, thousandths, at_least=True)),
            fields(mean_of("decode", "fa3", OURS), least_of("decode", "fa3", OURS)),
        ),
        Row(
            "the same with FlashAttention-3's schedule made ahead",
            "h200-serving",
            (Bound("geometric mean", None, ratio), Bound("least", None, thousandths)),
            fields(mean_of("decode", "fa3 planned", OURS), least_of("decode", "fa3 planned", OURS)),
        ),
        Row(
            "the same cells against FlashInfer, its plan made ahead",
            "h200-serving-flashinfer",
            (mean(1.1), least(1.0)),
            fields(mean_of("decode", "flashinfer", OURS), least_of("decode", "flashinfer", OURS)),
        ),
        Row(
            "a ragged batch of 64 sequences of 200 to 64k keys: share of 4.8 TB/s, and against FlashAttention-3",
            "h200-serving",
            (
                Bound("", 0.85, share, at_least=True),
                Bound("against FlashAttention-3", None, thousandths),
            ),
            fields(share_of_peak("ragged", OURS), least_of("ragged", "fa3", OURS)),
        ),
        Row(
            "window of 128 with sinks, D=64, 64/8 heads, one sequence of 128 to 128k keys, which stay in the L2 cache",
            "h200-serving",
            (
                Bound("most", 5, unit("µs")),
                Bound("against FlashAttention-3, least", 2.0, ratio, at_least=True),
            ),
            fields(most_us_alone("window", OURS), least_alone("window", "fa3", OURS)),
        ),
        Row(
            "`split_keys` over the call without, from 8k keys on: the best size of each cell; 512 and 1,024 of one "
            "sequence of 8k left out",
            "h200-serving",
            (Bound("most", 1.05, ratio),),
            fields(most_at_best("split", "free")),
        ),
        Row(
            "4 and 8 query tokens of each of 1, 8 and 64 sequences of 8k keys over one",
            "h200-serving",
            (Bound("4", 1.12, ratio), Bound("8", 1.25, ratio)),
            fields(most_of_queries("4"), most_of_queries("8")),
        ),
        Row(
            "prompts at D=128, packed and in pages of 64: dense time over theirs, and packed against FlashAttention-3; "
            "the least of six batches",
            "h200-serving",
            (
                Bound("packed", 0.97, thousandths, at_least=True),
                Bound("pages", 0.95, thousandths, at_least=True),
                Bound("against FlashAttention-3", 1.05, thousandths, at_least=True),
            ),
            fields(
                least_of("prefill", "dense", "packed"),
                least_of("prefill", "dense", OURS),
                least_of("prefill", "fa3", "packed"),
            ),
        ),
        Row(
            "the same without the batch of 32 prompts of 512",
            "h200-serving",
            (
                Bound("packed", 0.97, thousandths, at_least=True),
                Bound("pages", 0.95, thousandths, at_least=True),
                Bound("against FlashAttention-3", 1.05, thousandths, at_least=True),
            ),
            fields(
                of_cases("prefill", "dense", "packed", but=(SHORT_PROMPTS,)),
                of_cases("prefill", "dense", OURS, but=(SHORT_PROMPTS,)),
                of_cases("prefill", "fa3", "packed", but=(SHORT_PROMPTS,)),
            ),
        ),
        Row(
            "a chunk of 2k with 128 decodes of 2k in one launch, over two launches, and against FlashAttention-3's one",
            "h200-serving",
            (
                Bound("two launches", 1.1, ratio, at_least=True),
                Bound("FlashAttention-3", None, ratio),
            ),
            fields(least_of("chunk", "two launches", "one launch"), least_of("chunk", "fa3", "one launch")),
        ),
        Row(
            "a cache of FP8 from 8 sequences of 8k on, against 16 bits, and against FlashAttention-3, which makes "
            "queries of FP8; least",
            "h200-serving",
            (
                Bound("16 bits", 1.7, ratio, at_least=True),
                Bound("FlashAttention-3", 1.4, ratio, at_least=True),
            ),
            fields(
                from_batch("fp8", 8, "16 bits", "fp8"),
                from_batch("fp8", 8, "fa3, making them so", "fp8"),
            ),
        ),
        Row(
            "host time of a layer's call, eager: made in Python, and by the function of C",
            "h200-serving",
            (Bound("Python", 6, unit("µs")), Bound("C", 6, unit("µs"))),
            fields(host_us("attention_varlen", "python"), host_us("attention_varlen", "native")),
        ),
    ),
    "models": (
        Row(
            "Llama-3-8B shapes, 8 layers, prefill of 2,048, 8,192, 32,768 and 98,304 tokens",
            "h200-models",
            tuple(
                Bound(f"{tokens:,}", limit, ratio, at_least=True)
                for tokens, limit in ((2048, 1.01), (8192, 1.01), (32768, 1.04), (98304, 1.1))
            ),
            fields(*(model(f"llama-prefill-{tokens}") for tokens in (2048, 8192, 32768, 98304))),
        ),
        Row(
            "the same, a training step of 8,192 tokens",
            "h200-models-rotations",
            (Bound("", 1.05, ratio, at_least=True),),
            fields(model("llama-training-8192")),
        ),
        Row(
            "Qwen3-30B-A3B shapes, 8 layers, prefill of 512, 4,096 and 16,384 tokens",
            "h200-models-rotations",
            tuple(Bound(f"{tokens:,}", 1.5, ratio, at_least=True) for tokens in (512, 4096, 16384)),
            fields(*(model(f"qwen-prefill-{tokens}") for tokens in (512, 4096, 16384))),
        ),
        Row(
            "the same, one token and 16, eager",
            "h200-models-rotations",
            (Bound("1", 1.2, ratio, at_least=True), Bound("16", 1.2, ratio, at_least=True)),
            fields(model("qwen-few-1"), model("qwen-few-16")),
        ),
        Row(
            "the same, one token compiled with CUDA graphs",
            "h200-models-rotations",
            (Bound("", 1.4, ratio, at_least=True),),
            fields(model("qwen-few-1-compiled")),
        ),
        Row(
            "the same, 16 tokens compiled with CUDA graphs",
            "h200-models-few",
            (Bound("", 1.4, ratio, at_least=True),),
            fields(model("qwen-few-16-compiled")),
        ),
        Row(
            "eager code's GPU time over that of torch.compile, both with the kernels: 4 layers of Llama-3-8B, 2,048 "
            "and 8,192 tokens",
            "h200-compiled-stack",
            tuple(Bound(f"{tokens:,}", 1.0, ratio, at_least=True) for tokens in (2048, 8192)),
            fields(compiled(2048), compiled(8192)),
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
            "the layers of GPT-OSS-20B with 8 and 2,048 tokens and of Mixtral-8x7B with 8,192, GPU time alone; later",
            "h200-moe-gpt-oss-queue",
            (mean(1.0), least(1.0)),
            against(["grouped_mm", "grouped_mm_compiled"], 3),
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
        Row(
            "on CPU with AVX2: one token of a layer of Qwen3-30B-A3B with weights of 4 bits, over the same in 16",
            "cpu-moe-int4-avx2",
            (Bound("", 2.5, ratio, at_least=True),),
            on_case("qwen3-30b-1"),
        ),
        Row(
            "the same on a Zen 3, processor time on one thread",
            "cpu-zen3-moe-int4",
            (Bound("", 2.5, ratio, at_least=True),),
            on_case("qwen3-30b-1"),
        ),
        Row(
            "the same on CPU with AVX-512 and VNNI, two cores of a Xeon",
            "cpu-moe-int4-vnni",
            (Bound("", 2.5, ratio, at_least=True),),
            on_case("qwen3-30b-1"),
        ),
    ),
    "lab": (
        Row(
            "races of a version against itself on a 2-core machine, two at a time, called different",
            "cpu-races-calm",
            (Bound("races", 200, unit(""), at_least=True), Bound("called", 0.05, share)),
            false_calls,
        ),
        Row(
            "races against a kernel made 3 % slower on purpose, called slower",
            "cpu-races-calm",
            (Bound("races", 60, unit(""), at_least=True), Bound("found", 0.95, share, at_least=True)),
            races("slower.json", "slower"),
        ),
        Row(
            "races of equal code beside 1, 2 and 4 programs for every processor, called equal",
            "cpu-busy-loads",
            (Bound("races", 200, unit(""), at_least=True), Bound("equal", 0.95, share, at_least=True)),
            busy("same", "equal"),
        ),
        Row(
            "races of code that takes a tenth more, there, called slower",
            "cpu-busy-loads",
            (Bound("races", None, unit("")), Bound("found", 0.95, share, at_least=True)),
            busy("slower", "slower"),
        ),
        Row(
            "bisections of 16 commits with one slowdown of 10 %",
            "cpu-races",
            (Bound("runs", 20, unit(""), at_least=True), Bound("right", 19, unit(""), at_least=True)),
            bisections,
        ),
        Row(
            "what `run` predicts for a captured script, against the replay: off by this share of the script's time",
            "cpu-predictions",
            (
                Bound("training", 0.1, share),
                Bound("prefill", 0.1, share),
                Bound("generation with experts", 0.1, share),
            ),
            prediction_errors("train_gpt", "prefill_llama", "generate_qwen3_moe"),
        ),
        Row(
            "honest kernels, run as candidates again and again, each audited in every run, that were accused of "
            "anything",
            "cpu-honest-6",
            (
                Bound("kernels", 30, unit(""), at_least=True),
                Bound("runs", 5, unit(""), at_least=True),
                Bound("audited", 150, unit(""), at_least=True),
                Bound("accusations", 0, unit("")),
            ),
            fields(honest("kernels"), honest("runs"), honest("audited"), honest("accusations")),
        ),
        Row(
            "sweeps on the CPU with one configuration made 6 % faster: it is installed, and no other; blocks of the "
            "race over those of an exhaustive sweep, and all blocks with the default's and the confirmation's on "
            "both sides",
            "cpu-tuning",
            (
                Bound("sweeps", 20, unit(""), at_least=True),
                Bound("installed", 20, unit(""), at_least=True),
                Bound("race", 0.2, share),
                Bound("all", 0.2, share),
            ),
            fields(
                tuning("sweeps"), tuning("planted_installed"), tuning("blocks_share"), tuning("timed_share")
            ),
        ),
        Row(
            "what the tables of an H200 that come with the package give over the usual choice, in all cells that were "
            "tuned",
            "h200-tuned",
            (
                Bound("slower", 0, unit("")),
                Bound("geometric mean", 1.02, lambda value: f"{value:.3f}×", at_least=True),
            ),
            fields(tuned("slower"), tuned("geomean")),
        ),
        Row(
            "two hours of 1,000 invented GPUs under the real coordinator and journal: one core's time, and the GPUs' "
            "idle time",
            "cpu-fleet",
            (Bound("", 60, unit("s")), Bound("idle", 0.1, share)),
            fields(fleet("large", "processor_s"), fleet("large", "idle_share")),
            among=fleet_has("large"),
        ),
        Row(
            "tunings of invented fleets with limits of time and money drawn by chance that passed one",
            "cpu-fleet",
            (
                Bound("tunings", 1000, lambda value: f"{value:,.0f}", at_least=True),
                Bound("passed", 0, unit("")),
            ),
            fields(fleet("budgets", "seeds"), fleet("budgets", "passed")),
            among=fleet_has("budgets"),
        ),
        Row(
            "simulated fleets of 4, 8 and 16 machines whose truth lay in the 95 % interval over them",
            "cpu-fleet",
            (Bound("least", 0.93, share, at_least=True), Bound("most", 0.97, share)),
            fleet_coverage,
            among=fleet_has("coverage"),
        ),
        Row(
            "`kill -9` of a tuning's coordinator or one of its workers at a random moment; tunings without their right "
            "end behind it; blocks lost or counted twice",
            "cpu-fleet",
            (
                Bound("kills", 100, unit(""), at_least=True),
                Bound("tunings", 0, unit("")),
                Bound("blocks", 0, unit("")),
            ),
            fleet_kills,
            among=fleet_has("kills"),
        ),
        Row(
            "random calls of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, and damaged cache "
            "entries",
            "hardening-whole",
            (
                Bound("calls", 1e4, lambda value: f"{value:,.0f}", at_least=True),
                Bound("entries", 1e4, lambda value: f"{value:,.0f}", at_least=True),
                Bound("failures", 0, unit("")),
            ),
            fields(hardened("kernel_calls"), hardened("damaged_entries"), hardened("failures")),
        ),
        Row(
            "`cudadent42 mcp`, from its start to the first answer",
            "cpu-mcp-start",
            (Bound("", 300, unit("ms")),),
            mcp_start,
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
