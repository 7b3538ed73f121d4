"""Continuous batching over a paged cache: Qwen3-MoE with random weights, attention and experts by PyTorch and by ours.

python examples/serve.py [--device cuda] [--requests 12] [--tokens 16]        needs: pip install '.[transformers]'

Each step is one call of the model on the tokens of many requests: chunks of prompts that just came, and the next token
of each that is being answered. Keys and values lie in pages that requests take as they grow and give back at their end.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import flashmoe_science
from flashmoe_science.varlen.append import slots_of

PAGE = 16
TOKENS_OF_A_STEP = 64
LENGTHS = (90, 45, 30, 22, 18, 15)
"""Of prompts, by Zipf's law."""


@dataclass
class Request:
    """A prompt, what was generated for it, and where its keys lie."""

    tokens: list[int]
    prompt: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """The sequences of one call of the model, for every layer the same."""

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    lengths: list[tuple[int, int]]
    """Queries and keys of each, for PyTorch's attention: ours needs the bounds alone."""


class Cache:
    """Pages of all layers, and the step that attention is asked for."""

    def __init__(self, model: Qwen3MoeForCausalLM, pages: int) -> None:
        config = model.config
        shape = (config.num_hidden_layers, 2, pages, PAGE, config.num_key_value_heads, config.head_dim)
        self.pages = torch.zeros(shape, device=model.device, dtype=model.dtype)
        self.free = list(range(pages))
        self.step: Step | None = None


def paged_ours(module, query, key, value, attention_mask, paged: Cache, scaling=None, **kwargs):
    """transformers' contract for attention: (1, heads, tokens, head_dim) in, (1, tokens, heads, head_dim) out."""
    step, (key_pages, value_pages) = paged.step, paged.pages[module.layer_idx]
    flashmoe_science.paged_append(
        key[0].transpose(0, 1), value[0].transpose(0, 1), key_pages, value_pages, step.slots
    )
    output = flashmoe_science.attention_varlen(
        query[0].transpose(0, 1),
        key_pages,
        value_pages,
        cu_seqlens_q=step.cu_seqlens_q,
        seqused_k=step.seqused_k,
        block_table=step.block_table,
        max_seqlen_q=max(queries for queries, _ in step.lengths),
        max_seqlen_k=max(keys for _, keys in step.lengths),
        softmax_scale=scaling,
    )
    return output[None], None


def paged_pytorch(module, query, key, value, attention_mask, paged: Cache, scaling=None, **kwargs):
    """The same by PyTorch: each sequence's keys gathered from its pages, a call for each sequence."""
    step, pages = paged.step, paged.pages[module.layer_idx]
    for rows, new in zip(pages.flatten(1, 2), (key, value), strict=True):
        rows[step.slots] = new[0].transpose(0, 1)
    outputs, first = [], 0
    for index, (queries, keys) in enumerate(step.lengths):
        own = pages[:, step.block_table[index, : -(-keys // PAGE)]].flatten(1, 2)[:, :keys].transpose(1, 2)
        position = torch.arange(keys, device=query.device)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, first : first + queries],
                own[None, 0],
                own[None, 1],
                attn_mask=position <= position[keys - queries :, None],
                scale=scaling,
                enable_gqa=True,
            )
        )
        first += queries
    return torch.cat(outputs, 2).transpose(1, 2), None


def make_step(
    batch: list[tuple[Request, int]], cache: Cache, device: str
) -> tuple[Step, torch.Tensor, torch.Tensor]:
    """The step, its tokens and their positions. Requests take the pages that they need."""

    def on_device(numbers, dtype):
        return torch.tensor(numbers, device=device, dtype=dtype)

    for request, count in batch:
        while len(request.pages) * PAGE < request.computed + count:
            request.pages.append(cache.free.pop())
    table = torch.zeros(len(batch), max(len(request.pages) for request, _ in batch), dtype=torch.int32)
    for row, (request, _) in zip(table, batch, strict=True):
        row[: len(request.pages)] = torch.tensor(request.pages)
    table = table.to(device)
    tokens = [token for request, count in batch for token in request.tokens[request.computed :][:count]]
    positions = [request.computed + i for request, count in batch for i in range(count)]
    sequence = [index for index, (_, count) in enumerate(batch) for _ in range(count)]
    positions = on_device(positions, torch.int64)
    lengths = [(count, request.computed + count) for request, count in batch]
    step = Step(
        on_device([0, *itertools.accumulate(count for _, count in batch)], torch.int32),
        on_device([keys for _, keys in lengths], torch.int32),
        table,
        slots_of(table, PAGE, on_device(sequence, torch.int64), positions),
        lengths,
    )
    return step, on_device([tokens], torch.int64), positions[None]


@torch.inference_mode()
def serve(
    model: Qwen3MoeForCausalLM, prompts: list[list[int]], answer: int, device: str
) -> tuple[list[list[int]], float]:
    """What each prompt is answered with, greedily, and seconds for each token of the answers."""
    cache = Cache(model, sum(-(-(len(prompt) + answer) // PAGE) for prompt in prompts))
    waiting = [Request(list(prompt), len(prompt)) for prompt in prompts]
    everyone, running = list(waiting), []
    began = time.perf_counter()
    while waiting or running:
        batch, room = [(request, 1) for request in running], TOKENS_OF_A_STEP - len(running)
        while waiting and room > 0:
            count = min(room, waiting[0].prompt - waiting[0].computed)
            batch.append((waiting[0], count))
            room -= count
            if waiting[0].computed + count < waiting[0].prompt:
                break
            running.append(waiting.pop(0))
        cache.step, tokens, positions = make_step(batch, cache, device)
        last = (cache.step.cu_seqlens_q[1:] - 1).long()
        logits = model(
            tokens, position_ids=positions, use_cache=False, paged=cache, logits_to_keep=last
        ).logits[0]
        for (request, count), token in zip(batch, logits.argmax(-1).tolist(), strict=True):
            request.computed += count
            if request.computed == len(request.tokens):
                request.tokens.append(token)
            if len(request.tokens) == request.prompt + answer:
                cache.free += request.pages
                running.remove(request)
    seconds = time.perf_counter() - began
    return [request.tokens[request.prompt :] for request in everyone], seconds / (len(prompts) * answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16, help="generated for each request")
    options = parser.parse_args()
    if options.requests < 1 or options.tokens < 1:
        parser.error("--requests and --tokens are at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device; leave --device out to serve on the CPU")
    for name, function in (("paged-ours", paged_ours), ("paged-pytorch", paged_pytorch)):
        AttentionInterface.register(name, function)
        # Sequences are told apart by their lengths; a mask is never made.
        AttentionMaskInterface.register(name, lambda *arguments, **named: None)
    configuration = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    library = Qwen3MoeForCausalLM(configuration).eval().to(options.device, dtype)
    ours = copy.deepcopy(library)
    flashmoe_science.accelerate(ours)
    ours.set_attn_implementation("paged-ours")
    library.set_attn_implementation("paged-pytorch")
    lengths = itertools.islice(itertools.cycle(LENGTHS), options.requests)
    prompts = [torch.randint(1, 512, (length,)).tolist() for length in lengths]
    for model in (library, ours):
        serve(model, prompts[:2], 2, options.device)  # compiles the kernels
    expected, library_seconds = serve(library, prompts, options.tokens, options.device)
    answers, seconds = serve(ours, prompts, options.tokens, options.device)
    same = sum(a == b for a, b in zip(answers, expected, strict=True))
    print(f"{same} of {len(prompts)} answers are the same; others part where rounding decides")
    print(f"{1 / library_seconds:.0f} tokens per second by PyTorch, {1 / seconds:.0f} by ours")
    print(
        f"a token takes {library_seconds * 1e3:.1f} ms, {seconds * 1e3:.1f} ms with ours: "
        f"{library_seconds / seconds:.2f}x"
    )


if __name__ == "__main__":
    main()
