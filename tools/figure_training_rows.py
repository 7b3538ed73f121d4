"""The rows of docs/figures.md about experts that train."""

from __future__ import annotations

from figure_bounds import Bound, Row, least, mean, ratio, unit
from figure_readers import against, fields, model
from figure_training import kept_gigabytes, losses_off, step_rate

STEPS = "h200-moe-step-pairs"
TEXTS = "h200-moe-backward"
MODELS = "h200-moe-training"

TRAINING: tuple[Row, ...] = (
    Row(
        "training steps of four layers, forward and backward pass, against the faster `grouped_mm`; pairs of blocks "
        "from 256 slots an expert on",
        STEPS,
        (mean(1.35), least(1.2)),
        against(["grouped_mm", "grouped_mm_compiled"], 4),
    ),
    Row(
        "the same of Qwen3-30B-A3B with 32,768 tokens: 18 · tokens · k · hidden · intermediate over its time",
        STEPS,
        (Bound("", 470, unit("TFLOP/s"), at_least=True),),
        fields(step_rate("qwen3-30b-32768")),
    ),
    Row(
        "kept between its passes, with the hidden states and without (`third.txt`)",
        TEXTS,
        (Bound("with", 1.0, unit("GB")), Bound("without", None, unit("GB"))),
        kept_gigabytes,
    ),
    Row(
        "a training step of four layers of Qwen3-30B-A3B with attention, 8,192 tokens, against the fastest setting of "
        "transformers (SDPA and `grouped_mm`): with the loss over the vocabulary, and the layers alone",
        MODELS,
        (Bound("whole", 1.2, ratio, at_least=True), Bound("layers", None, ratio)),
        fields(model("qwen-training-8192"), model("qwen-layers-training-8192")),
    ),
    Row(
        "losses of two layers over 200 steps, three seeds: distance from float32's, over that of transformers' "
        "`grouped_mm` or loop in bf16, whichever is larger; asked: within bf16's spread",
        MODELS,
        (Bound("mean", 1.0, ratio), Bound("most", 1.0, ratio)),
        losses_off,
    ),
)
