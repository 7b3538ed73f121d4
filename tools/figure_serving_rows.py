"""The rows of docs/figures.md about attention for serving."""

from __future__ import annotations

from figure_bounds import Bound, Row, mean, ratio, share, thousandths, unit
from figure_gradients import errors_over_torch
from figure_readers import fields
from figure_serving import (
    from_batch,
    host_us,
    in_pages_of,
    least_alone,
    least_of,
    least_rate,
    mean_of,
    most_at_best,
    most_at_one,
    most_between,
    most_of_queries,
    most_over_dense,
    most_us_alone,
    share_of_peak,
)

OURS = "pages of 64"
RACED = "h200-serving-again"
"""All ways of a kind in one run."""
NEWER = "h200-serving-fp8"
"""Without windows and prompts, beside FlashAttention-3."""
ALONE = "h200-serving-split"
"""Calls of our own beside each other."""
AGAIN = "h200-serving-split-again"
SMALL_PAGES = "h200-serving-small-pages"
"""Some of these with later kernels."""
FP8_SUITE = "h200-lab-decode-fp8"

SERVING: tuple[Row, ...] = (
    Row(
        "decode over pages of 64 with at least 0.5 GB of keys and values: rate, and time over dense",
        NEWER,
        (
            Bound("least", 4.2, unit("TB/s"), at_least=True),
            Bound("most", 1.03, thousandths),
        ),
        fields(least_rate(64), most_over_dense(64)),
    ),
    Row(
        "the same over pages of 16 and of 1, time over dense",
        NEWER,
        (Bound("16", 1.05, thousandths), Bound("1", 1.15, thousandths)),
        fields(most_over_dense(16), most_over_dense(1)),
    ),
    Row(
        "decode over pages of 64 against FlashAttention-3, {1, 8, 64} sequences of {1k, 8k, 32k} keys",
        NEWER,
        (mean(1.25), Bound("least", 1.0, thousandths, at_least=True)),
        fields(mean_of("decode", "fa3", OURS), least_of("decode", "fa3", OURS)),
    ),
    Row(
        "the same with FlashAttention-3's schedule made ahead",
        NEWER,
        (Bound("geometric mean", None, ratio), Bound("least", None, thousandths)),
        fields(mean_of("decode", "fa3 planned", OURS), least_of("decode", "fa3 planned", OURS)),
    ),
    Row(
        "the same cells against FlashInfer, its plan made ahead",
        NEWER,
        (mean(1.1), Bound("least", 1.0, thousandths, at_least=True)),
        fields(mean_of("decode", "flashinfer", OURS), least_of("decode", "flashinfer", OURS)),
    ),
    Row(
        "a ragged batch of 64 sequences of 200 to 64k keys: share of 4.8 TB/s, and against FlashAttention-3",
        NEWER,
        (
            Bound("", 0.85, share, at_least=True),
            Bound("against FlashAttention-3", None, thousandths),
            Bound("its schedule made ahead", None, thousandths),
        ),
        fields(
            share_of_peak("ragged", OURS),
            least_of("ragged", "fa3", OURS),
            least_of("ragged", "fa3 planned", OURS),
        ),
    ),
    Row(
        "in a decode launch, finding a block's share from lengths in device memory, 1 to 64 sequences",
        "h200-decode-floor",
        (Bound("most", 2, unit("µs")),),
        fields(most_between("share", "nothing")),
    ),
    Row(
        "window of 128 with sinks, D=64, 64/8 heads, one sequence of 128 to 128k keys, which stay in the L2 cache",
        RACED,
        (
            Bound("most", 5, unit("µs")),
            Bound("against FlashAttention-3, least", 2.0, ratio, at_least=True),
        ),
        fields(most_us_alone("window", OURS), least_alone("window", "fa3", OURS)),
    ),
    Row(
        "`split_keys` over the call without, from 8k keys on: the best size of each cell, and the best one for all",
        AGAIN,
        (Bound("of each", 1.05, ratio), Bound("one for all", 1.05, ratio)),
        fields(most_at_best("split", "free"), most_at_one("split", "free")),
    ),
    Row(
        "4 and 8 query tokens of each of 1, 8 and 64 sequences of 8k keys over one",
        AGAIN,
        (Bound("4", 1.12, ratio), Bound("8", 1.25, ratio)),
        fields(most_of_queries("4"), most_of_queries("8")),
    ),
    Row(
        "prompts at D=128, packed and in pages of 64: dense time over theirs, and packed against FlashAttention-3; "
        "the least of six batches",
        RACED,
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
        "the same once more, without FlashAttention-3, and in pages of 16, 8 and 1",
        SMALL_PAGES,
        (
            Bound("packed", 0.97, thousandths, at_least=True),
            Bound("pages of 64", 0.95, thousandths, at_least=True),
            *(Bound(f"of {page}", None, thousandths) for page in (16, 8, 1)),
        ),
        fields(
            least_of("prefill", "dense", "packed"),
            *(least_of("prefill", "dense", f"pages of {page}") for page in (64, 16, 8, 1)),
        ),
    ),
    Row(
        "a chunk of 2k with 128 decodes of 2k in one launch, over two launches",
        ALONE,
        (
            Bound("pages of 64", 1.1, thousandths, at_least=True),
            Bound("of 16", 1.1, thousandths, at_least=True),
        ),
        fields(
            in_pages_of(64, "chunk", "two launches", "one launch"),
            in_pages_of(16, "chunk", "two launches", "one launch"),
        ),
    ),
    Row(
        "the same against FlashAttention-3's one launch",
        NEWER,
        (Bound("least", None, ratio),),
        fields(least_of("chunk", "fa3", "one launch")),
    ),
    Row(
        "a cache of FP8 from 8 sequences of 8k on, against 16 bits, and against FlashAttention-3, which makes "
        "queries of FP8; least",
        NEWER,
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
        "error of decode over caches in FP8 against float64 over the same elements, as a share of PyTorch's own in 16 "
        "bits; random inputs, the most of the 15 cases of the suite `decode-fp8`",
        FP8_SUITE,
        tuple(Bound(norm, 1.1, ratio) for norm in ("worst element", "worst row", "RMS")),
        errors_over_torch(variants=False),
    ),
    Row(
        "host time of a layer's call, eager, made in Python and by the function of C: the middle of three processes, "
        "each one's least round",
        "h200-serving-host",
        (Bound("Python", 6, unit("µs")), Bound("C", 6, unit("µs"))),
        fields(host_us("attention_varlen", "python"), host_us("attention_varlen", "native")),
    ),
)
