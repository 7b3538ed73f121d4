"""The rows of docs/figures.md: what was asked, and where what was reached is read."""

from __future__ import annotations

from figure_bounds import Bound, Row, least, mean, ratio, share, unit
from figure_gradient_rows import (
    ERRORS_ON_CPU,
    ERRORS_ON_H200,
    beside_flash_attention_3,
    training_steps,
)
from figure_lab_rows import LAB
from figure_readers import (
    against,
    against_each,
    against_on,
    compiled,
    decode_share,
    fields,
    first_calls,
    four_bits,
    host,
    least_of_small,
    mean_and_least,
    memory_beyond_output,
    model,
    moe_memory,
    of_measured_peak,
    part,
    peak_share,
    share_between,
    small_alone,
)
from figure_serving_rows import SERVING
from figure_training_rows import TRAINING

CUDNN, FLASH_ATTENTION_4 = "pytorch_cudnn", "flash_attn_cute"
PEERS = ("pytorch", CUDNN, "pytorch_flash", FLASH_ATTENTION_4)
"""Of the backward pass, in a run of the suites `backward` and `training-step`."""
DECODE_WAYS = {"dense": "dense calls", "paged": "pages of 64"}
"""Ways of benchmarks/decode_cpu.py, each with a query head for each key head."""
FOUR_HEADS = "paged, 4 heads a key"

FOUR_BITS = (
    Bound("", 2.5, ratio, at_least=True),
    Bound("4 bits", None, unit("GB/s")),
    Bound("16 bits", None, unit("GB/s")),
)

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
            "the suite's 24 cells on a Xeon with AVX-512 and without AMX, whose PyTorch has AVX-512, too",
            "cpu-xeon-avx512",
            (mean(4.0), least(2.0)),
            mean_and_least(24),
        ),
        Row("there in fp32", "cpu-xeon-avx512-fp32", (mean(2.2), least(1.6)), mean_and_least(12)),
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
        Row(
            "the same in another hour of those neighbours",
            "cpu-zen3-avx2-again",
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
            "the same on that Zen 3 in another hour, fp32 with tiles of 24 queries, the median of three",
            "cpu-zen3-avx2-peak-wide",
            (Bound("fp32", 0.8, share, at_least=True), Bound("bf16", 0.8, share, at_least=True)),
            fields(peak_share("fp32", "wide-*.json"), peak_share("bf16", "wide-*.json")),
        ),
        Row(
            "there, of what multiply-adds reached just before each call",
            "cpu-zen3-avx2-peak-wide",
            (Bound("fp32", None, share), Bound("bf16", None, share)),
            fields(share_between("fp32", "wide-*.json"), share_between("bf16", "wide-*.json")),
        ),
        Row(
            "(1, 8, 2048, 64) full: share of the machine's measured peak",
            "cpu-peak",
            (Bound("fp32", 0.8, share, at_least=True), Bound("bf16", 0.7, share, at_least=True)),
            fields(peak_share("fp32"), peak_share("bf16")),
        ),
        Row(
            "the same on two cores of a Xeon with AVX-512 and without AMX",
            "cpu-xeon-avx512-fp32",
            (Bound("fp32", 0.8, share, at_least=True),),
            of_measured_peak("seq-2048"),
        ),
        *(
            Row(
                f"decode, one sequence of 32,768 keys on all cores, {name}: share of reading the same memory in order, "
                "median run",
                "cpu-decode",
                tuple(
                    Bound(f"{cpu} {dtype}", 0.8, share, at_least=True)
                    for cpu in ("AVX-512", "AVX2")
                    for dtype in ("fp16", "bf16", "fp32")
                ),
                fields(
                    *(
                        decode_share(folder, dtype, way)
                        for folder in ("avx512", "avx2")
                        for dtype in ("fp16", "bf16", "fp32")
                    )
                ),
            )
            for way, name in DECODE_WAYS.items()
        ),
        *(
            Row(
                f"the same {machine}, {name}",
                f"cpu-{kind}-decode",
                tuple(Bound(dtype, 0.8, share, at_least=True) for dtype in ("fp16", "bf16", "fp32")),
                fields(*(decode_share(part, dtype, way) for dtype in ("fp16", "bf16", "fp32"))),
            )
            for kind, part, machine in (
                ("zen3", "avx2", "on a Zen 3, which has AVX2 alone"),
                ("amx", "amx", "on the 16 cores of a Xeon with AMX"),
            )
            for way, name in DECODE_WAYS.items()
        ),
        *(
            Row(
                f"the same on 16 cores of another Xeon with AMX, since pages of memory take turns, {name}",
                "cpu-amx-decode-16",
                tuple(Bound(dtype, 0.8, share, at_least=True) for dtype in ("fp16", "bf16", "fp32")),
                fields(*(decode_share("amx", dtype, way) for dtype in ("fp16", "bf16", "fp32"))),
            )
            for way, name in DECODE_WAYS.items()
        ),
        *(
            Row(
                f"the same on two cores of a Xeon with AMX, {name}",
                "cpu-amx-decode-2",
                tuple(Bound(dtype, 0.8, share, at_least=True) for dtype in ("fp16", "bf16", "fp32")),
                fields(*(decode_share("*", dtype, way) for dtype in ("fp16", "bf16", "fp32"))),
            )
            for way, name in DECODE_WAYS.items()
        ),
        *(
            Row(
                f"the same there, since rows of several pages of memory are asked for by turns, {name}",
                "cpu-amx-decode-by-turns",
                tuple(Bound(dtype, 0.8, share, at_least=True) for dtype in ("fp16", "bf16", "fp32")),
                fields(*(decode_share("*", dtype, way) for dtype in ("fp16", "bf16", "fp32"))),
            )
            for way, name in DECODE_WAYS.items()
        ),
        Row(
            "the same there with four query heads for each of the keys, pages of 64, since elements are widened",
            "cpu-amx-decode-four",
            tuple(Bound(dtype, 0.8, share, at_least=True) for dtype in ("fp16", "bf16", "fp32")),
            fields(*(decode_share("after", dtype, FOUR_HEADS) for dtype in ("fp16", "bf16", "fp32"))),
        ),
        Row(
            "gradients on two cores of a Zen 3, the 24 cells of the suite `backward-cpu` (fp32 and bf16), before what "
            "the rows below changed: not run since",
            "cpu-zen3-backward",
            (mean(1.5), least(1.0)),
            mean_and_least(24),
        ),
        Row(
            "the same on two cores of a Xeon with AMX",
            "cpu-amx-backward",
            (mean(1.5), least(1.0)),
            mean_and_least(24),
        ),
        Row(
            "the same there once more, since rows of few keys take Δ from their weights",
            "cpu-amx-backward-again",
            (mean(1.5), least(1.0)),
            mean_and_least(24),
        ),
        Row(
            "the same there, since small calls take less of the host's time",
            "cpu-amx-backward-small-calls",
            (mean(1.5), least(1.0)),
            mean_and_least(24),
        ),
        *ERRORS_ON_CPU,
        Row(
            "prompts on two cores of a Xeon with AMX, the 6 batches of `benchmarks/suites/prompts-cpu.toml` in bf16",
            "cpu-amx-prompts",
            (mean(), least()),
            mean_and_least(6),
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
            "the same against the best of cuDNN, FlashAttention-3 and FlashAttention-4 in each cell, all in one run",
            "h200-hopper-beside-all",
            (mean(0.88), least()),
            against(["pytorch", CUDNN, FLASH_ATTENTION_4, "flash_attn_3"], 36),
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
            "FlashAttention-4 in each of the 36 cells of the suite `backward`, GPU time; FlashAttention-3 is left out",
            "h200-backward",
            (mean(1.0), least(0.9)),
            against(PEERS, 36),
        ),
        Row(
            "the same against cuDNN",
            "h200-backward",
            (mean(1.1), least(1.1)),
            against(["pytorch", CUDNN], 36),
        ),
        Row(
            "the same at 512 keys and head dims 64 and 128, against the best of all, in a run of those four cells",
            "h200-backward-512",
            tuple(
                Bound(f"{head_dim} {mask}", 1.15, ratio, at_least=True)
                for head_dim in (64, 128)
                for mask in ("full", "causal")
            ),
            against_each(
                PEERS,
                *(f"d{head_dim}-{mask}-512" for head_dim in (64, 128) for mask in ("full", "causal")),
            ),
        ),
        *beside_flash_attention_3(PEERS),
        Row(
            "portable kernels of gradients against PyTorch's FlashAttention-2, head dims 64 and 128, 24 cells, GPU "
            "time",
            "h200-backward-one-pass",
            (mean(1.0), least(1.0)),
            against(["pytorch_flash"], 24, beginnings=("d64", "d128")),
        ),
        training_steps(PEERS),
        *ERRORS_ON_H200,
        Row(
            "host time per call, steady state",
            "h200-host",
            (Bound("", 9, unit("µs")),),
            fields(host("host_us", "flash_attention")),
        ),
        Row(
            "host time of training: a forward pass with a gradient, a backward pass, and both in a layer",
            "h200-host-training",
            (
                Bound("forward", 10, unit("µs")),
                Bound("backward", 15, unit("µs")),
                Bound("layer", 25, unit("µs")),
                Bound("SDPA's layer", None, unit("µs")),
            ),
            fields(
                *(
                    host("host_us", call)
                    for call in (
                        "forward with a gradient",
                        "backward",
                        "forward and backward of a layer",
                        "forward and backward of a layer, sdpa",
                    )
                )
            ),
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
    "serving": SERVING,
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
        *TRAINING,
        Row(
            "on CPU against PyTorch's loop over the experts, the 16 cells of the suite `moe-cpu`",
            "cpu-moe",
            (mean(1.0), least(1.0)),
            mean_and_least(16),
        ),
        *(
            Row(what, kind, FOUR_BITS, four_bits("qwen3-30b-1"))
            for what, kind in (
                (
                    "on CPU with AVX2: one token of a layer of Qwen3-30B-A3B with weights of 4 bits, over the same in "
                    "16; and at what rates weights come",
                    "cpu-moe-int4-avx2",
                ),
                ("the same on a Zen 3, which has AVX2 alone", "cpu-zen3-moe-int4"),
                (
                    "the same with AVX512-BF16 on an AMD processor, before the products of VNNI",
                    "cpu-moe-int4",
                ),
                (
                    "the same on two cores of a Xeon with AMX and VNNI, whose L3 holds the weights",
                    "cpu-moe-int4-vnni",
                ),
                ("the same on 16 cores of such a Xeon", "cpu-amx-moe-int4-16"),
            )
        ),
    ),
    "lab": LAB,
}
