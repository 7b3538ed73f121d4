"""The rows of docs/figures.md about experts that train."""

from __future__ import annotations

import statistics
from pathlib import Path

from figure_bounds import Bound, Row, mean, ratio, unit
from figure_readers import against_each, against_on, fields, model
from figure_training import kept_gigabytes, losses_off, peak_over_library, step_rate, time_over_ours

STEPS = "h200-moe-step"
RECOMPUTED = "h200-moe-step-recompute"
LIGER = "h200-moe-step-liger"
MODELS = "h200-moe-training"
LOSSES = "h200-moe-losses"

LIBRARY = ("grouped_mm", "grouped_mm_compiled")
LAYERS = {
    "Qwen3 4,096": "qwen3-30b-4096",
    "Qwen3 32,768": "qwen3-30b-32768",
    "Mixtral": "mixtral-8x7b-8192",
    "GPT-OSS": "gpt-oss-20b-8192",
}
ROUTINGS = ("uniform", "zipf", "hot")


def steps_of_layers(folder: Path) -> tuple[float, ...]:
    """Geometric mean, and each: the faster `grouped_mm`'s time over the candidate's."""
    ratios = against_each(LIBRARY, *LAYERS.values())(folder)
    return statistics.geometric_mean(ratios), *ratios


TRAINING: tuple[Row, ...] = (
    Row(
        "training steps of four layers, forward and backward pass, against the faster of `grouped_mm` eager and "
        "compiled; GPT-OSS's sizes and activation, without its biases",
        STEPS,
        (mean(1.35), *(Bound(layer, 1.2, ratio, at_least=True) for layer in LAYERS)),
        steps_of_layers,
    ),
    Row(
        "the same of Qwen3-30B-A3B with 4,096 tokens, whose experts are alike, fall as 1 / rank, or have one that "
        "every token chooses",
        STEPS,
        tuple(Bound(routing, None, ratio) for routing in ROUTINGS),
        against_each(LIBRARY, *(f"qwen3-30b-4096-{routing}" for routing in ROUTINGS)),
    ),
    Row(
        "the step of Qwen3-30B-A3B with 32,768 tokens: 18 · tokens · k · hidden · intermediate over its time",
        STEPS,
        (Bound("", 470, unit("TFLOP/s"), at_least=True),),
        fields(step_rate("qwen3-30b-32768")),
    ),
    Row(
        "the step of Qwen3-30B-A3B with 4,096 tokens against Liger's fused experts, with the host's time; Liger's "
        "result for Mixtral's layer failed its check",
        LIGER,
        (Bound("", 1.2, ratio, at_least=True),),
        against_on("qwen3-30b-4096", ["liger"]),
    ),
    Row(
        "kept between the passes of Qwen3-30B-A3B with 32,768 tokens, with the hidden states and without",
        LOSSES,
        (Bound("with", 1.0, unit("GB")), Bound("without", None, unit("GB"))),
        kept_gigabytes("qwen3-30b-32768"),
    ),
    Row(
        "a step that computes the projections again in place of keeping them, over one that keeps them (aim)",
        RECOMPUTED,
        tuple(Bound(layer, 1.08, ratio) for layer in LAYERS),
        time_over_ours("cudadent42_recompute", *LAYERS.values()),
    ),
    Row(
        "the most that both passes of a layer take, gradients included, over the smaller of `grouped_mm`: "
        "Qwen3-30B-A3B with 4,096 and 32,768 tokens, Mixtral-8x7B, GPT-OSS-20B",
        LOSSES,
        (
            Bound("4,096", None, ratio),
            Bound("32,768", None, ratio),
            Bound("Mixtral", None, ratio),
            Bound("GPT-OSS", None, ratio),
        ),
        fields(
            *map(
                peak_over_library,
                ("qwen3-30b-4096", "qwen3-30b-32768", "mixtral-8x7b-8192", "gpt-oss-20b-8192"),
            )
        ),
    ),
    Row(
        "a training step of four layers of Qwen3-30B-A3B with attention, 8,192 tokens, against the fastest setting of "
        "transformers (SDPA and `grouped_mm`): with the loss over the vocabulary, and the layers alone",
        MODELS,
        (Bound("whole", 1.2, ratio, at_least=True), Bound("layers", None, ratio)),
        fields(model("qwen-training-8192"), model("qwen-layers-training-8192")),
    ),
    Row(
        "losses of two layers over 200 steps, ten seeds: distance from float32's, over that of transformers' "
        "`grouped_mm` or loop in bf16, whichever is larger; asked: within bf16's spread",
        LOSSES,
        (Bound("mean", 1.0, ratio), Bound("most", 1.0, ratio)),
        losses_off,
    ),
)
