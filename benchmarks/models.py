"""Whole models of transformers with random weights: the kernels against the library's best own setting, on one device.

    python benchmarks/models.py --output FOLDER [--case llama-prefill-8192 ...] [--seconds 60]
    python benchmarks/models.py --output FOLDER --tiny --device cpu        # the same with toys, to try the script

Each case races one model in one process, with the same weights: the library's settings are timed briefly, and the
fastest one meets ours in interleaved blocks of random order, together with itself as a control. A sample is wall time,
device included, of as many calls as take 20 ms. What was taken and declined, and how far the outputs are apart, is
written beside the samples. FOLDER/models.json is written after each case; cases that it has are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from provenance import provenance
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashmoe_science
from cudadent42.decisions.schedule import block_orders
from cudadent42.decisions.statistics import estimate_ratio

SAMPLE_MS = 20.0
TINY_SAMPLE_MS = 1.0
SCREENING_SAMPLES = 5
MIN_BLOCKS, MAX_BLOCKS = 7, 40
MOST_APART = 0.1
"""Norm of the difference of two outputs over the norm of one. Two settings of the library in bfloat16 stay below."""
OURS, LIBRARY, CONTROL = "ours", "library", "library again"

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""Llama-3-8B, with a quarter of its layers."""
QWEN = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
}
"""Qwen3-30B-A3B, with a sixth of its layers."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class ModelCase:
    """A model and what is done with it."""

    name: str
    architecture: str
    """``llama`` or ``qwen``."""
    tokens: int
    compiled: bool = False
    """By torch.compile with CUDA graphs."""
    training: bool = False
    """A forward and a backward pass to every parameter; else a forward pass, of which one row of logits is kept."""
    layers: int | None = None
    """In place of the model's."""
    head: bool = True
    """Training: the loss over the vocabulary; else the layers alone, from a gradient of what they put out."""


CASES = (
    *(ModelCase(f"llama-prefill-{tokens}", "llama", tokens) for tokens in (2048, 8192, 32768, 98304)),
    ModelCase("llama-training-8192", "llama", 8192, training=True),
    *(ModelCase(f"qwen-prefill-{tokens}", "qwen", tokens) for tokens in (512, 4096, 16384)),
    ModelCase("qwen-training-8192", "qwen", 8192, training=True, layers=4),
    ModelCase("qwen-layers-training-8192", "qwen", 8192, training=True, layers=4, head=False),
    *(ModelCase(f"qwen-few-{tokens}", "qwen", tokens) for tokens in (1, 16)),
    *(ModelCase(f"qwen-few-{tokens}-compiled", "qwen", tokens, compiled=True) for tokens in (1, 16)),
)


@dataclass(frozen=True)
class Setting:
    """How a model computes attention and experts."""

    attention: str
    experts: str | None = None
    backend: SDPBackend | None = None
    """The one of scaled_dot_product_attention; PyTorch's choice if None."""

    @property
    def name(self) -> str:
        backend = "" if self.backend is None else f" {self.backend.name.partition('_')[0].lower()}"
        return self.attention + backend + ("" if self.experts is None else f", {self.experts}")


Call = Callable[[], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--seconds", type=float, default=60.0, help="For the blocks of one case.")
    parser.add_argument("--tiny", action="store_true", help="Toys in place of the models.")
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / "models.json"
    versions = {"transformers": transformers.__version__, "tiny": chosen.tiny}
    document: dict[str, Any] = {**provenance(chosen.device), **versions, "cases": []}
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    done = {row["case"] for row in document["cases"]}
    for case in CASES:
        if case.name in done or (chosen.case and case.name not in chosen.case):
            continue
        document["cases"].append(race(case, chosen.device, chosen.seconds, chosen.tiny))
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (chosen.output / "models.md").write_text(table(document), encoding="utf-8")
        print(line(document["cases"][-1]), flush=True)


def race(case: ModelCase, device: str, seconds: float, tiny: bool) -> dict[str, Any]:
    """The row of one case."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    # One for each setting. Past the limit, code runs uncompiled without a word.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    aimed_ms = TINY_SAMPLE_MS if tiny else SAMPLE_MS
    if tiny:
        case = replace(case, tokens=min(case.tokens, 64), compiled=False)
    model = make_model(case, device, tiny)
    ids = torch.randint(0, model.config.vocab_size, (1, case.tokens), device=device)
    screening: dict[str, float] = {}
    calls: dict[str, Call] = {}
    for setting in library_settings(case, device):
        call = make_call(case, model, setting, ids)
        try:
            call()
            call()  # the second of a compiled one records its graph
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"{case.name}: {setting.name} left out: {str(error).splitlines()[0]}", flush=True)
            continue
        repeats = repeats_of(call, aimed_ms)
        screening[setting.name] = statistics.median(
            sample_ms(call, repeats) for _ in range(SCREENING_SAMPLES)
        )
        calls[setting.name] = call
    best = min(screening, key=screening.__getitem__)
    library = calls[best]
    experts = "cudadent42" if case.architecture == "qwen" else None
    ours = make_call(case, model, Setting("cudadent42", experts), ids)
    flashmoe_science.reset_report()
    apart = difference(ours().detach().float().clone(), library().detach().float().clone())
    report = str(flashmoe_science.report()).splitlines()
    if not apart <= MOST_APART:  # NaN, too
        raise SystemExit(f"{case.name}: the outputs are {apart} apart; expected at most {MOST_APART}")
    ours()
    blocks = measure({LIBRARY: library, OURS: ours, CONTROL: library}, case.name, seconds, aimed_ms)
    return {
        "case": case.name,
        "tokens": case.tokens,
        "library": best,
        "screening_ms": screening,
        "outputs_apart": apart,
        "report": report,
        "blocks_ms": blocks,
        "ratio": ratio(blocks, OURS),
        "control": ratio(blocks, CONTROL),
    }


def make_model(case: ModelCase, device: str, tiny: bool) -> Any:
    """Random weights in bfloat16."""
    names = {"llama": ("Llama", LLAMA), "qwen": ("Qwen3Moe", QWEN)}
    name, sizes = names[case.architecture]
    if case.layers is not None:
        sizes = {**sizes, "num_hidden_layers": case.layers}
    configuration = getattr(transformers, f"{name}Config")(**(TINY if tiny else sizes), use_cache=False)
    with torch.device(device):
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(configuration, dtype=torch.bfloat16)
    return model.eval()


def library_settings(case: ModelCase, device: str) -> Iterator[Setting]:
    """What the library offers without us."""
    backends = (None, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if device == "cuda" else (None,)
    experts: tuple[str | None, ...] = (None,)
    if case.architecture == "qwen":
        # Copies the weights of each token's experts: for few tokens.
        experts = ("grouped_mm", "batched_mm") if case.tokens <= 16 else ("grouped_mm",)
    return (Setting("sdpa", *each) for each in itertools.product(experts, backends))


def make_call(case: ModelCase, model: Any, setting: Setting, ids: torch.Tensor) -> Call:
    """The case with a setting, on the weights of ``model``."""
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, shared)
    if setting.attention == "cudadent42":
        flashmoe_science.accelerate(twin)
    else:
        twin.set_attn_implementation(setting.attention)
        if setting.experts is not None:
            twin.set_experts_implementation(setting.experts)
    run = torch.compile(twin, mode="reduce-overhead", dynamic=False) if case.compiled else twin

    def choice() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if setting.backend is None else sdpa_kernel(setting.backend)

    def forward() -> torch.Tensor:
        if case.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad(), choice():
            logits: torch.Tensor = run(input_ids=ids, logits_to_keep=1).logits
        return logits

    output_gradient = None if case.head else gradient_of_layers(model, ids)

    def step() -> torch.Tensor:
        twin.zero_grad(set_to_none=True)
        with choice():
            if case.head:
                run(input_ids=ids, labels=ids).loss.backward()
            else:
                hidden = run.model(input_ids=ids).last_hidden_state
                hidden.backward(output_gradient)
        gradient: torch.Tensor = twin.model.layers[0].self_attn.q_proj.weight.grad
        return gradient

    return step if case.training else forward


def gradient_of_layers(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of what the layers put out; the same for all settings."""
    generator = torch.Generator(ids.device).manual_seed(0)
    shape = (*ids.shape, model.config.hidden_size)
    return torch.randn(shape, generator=generator, device=ids.device, dtype=model.dtype)


def measure(calls: dict[str, Call], case: str, seconds: float, aimed_ms: float) -> list[dict[str, float]]:
    """Milliseconds of a call, by name, block by block, until the time is over."""
    repeats = max(repeats_of(call, aimed_ms) for call in calls.values())
    blocks: list[dict[str, float]] = []
    began = time.monotonic()
    for order in block_orders(list(calls), MAX_BLOCKS, 0, case):
        if len(blocks) >= MIN_BLOCKS and time.monotonic() - began > seconds:
            break
        blocks.append({name: sample_ms(calls[name], repeats) for name in order})
    return blocks


def repeats_of(call: Call, aimed_ms: float) -> int:
    return max(1, round(aimed_ms / sample_ms(call, 1)))


def sample_ms(call: Call, repeats: int) -> float:
    """Milliseconds of one call, host and device, as the mean of some that follow each other."""
    synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - began) * 1e3 / repeats


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def ratio(blocks: list[dict[str, float]], name: str) -> dict[str, float]:
    """Above 1 it takes less time than the library."""
    library, candidate = (np.array([block[each] for block in blocks]) for each in (LIBRARY, name))
    estimate = estimate_ratio(library, candidate, 0)
    low, high = estimate.interval()
    return {"ratio": estimate.ratio, "ci_low": low, "ci_high": high}


def line(row: dict[str, Any]) -> str:
    ours, control = row["ratio"], row["control"]
    return (
        f"| {row['case']} | {row['library']} | {ours['ratio']:.3f} | {ours['ci_low']:.3f} to {ours['ci_high']:.3f} "
        f"| {control['ratio']:.3f} | {len(row['blocks_ms'])} |"
    )


def table(document: dict[str, Any]) -> str:
    head = [
        f"{document['machine']}, {document['date']}, transformers {document['transformers']}",
        "",
        "| case | the library's best setting | its time over ours | 95 % interval | over itself | blocks |",
        "| --- | --- | ---: | --- | ---: | ---: |",
    ]
    return "\n".join([*head, *(line(row) for row in document["cases"])]) + "\n"


if __name__ == "__main__":
    main()
