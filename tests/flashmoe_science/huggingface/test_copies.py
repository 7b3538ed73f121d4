"""A training step in the layout of transformers' models: projections seen by head, and nothing of it copied."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import flashmoe_science
from flashmoe_science.takeover.counts import Entry

pytest.importorskip("transformers", "5.8.1", reason="needs transformers 5.8.1")

from flashmoe_science.huggingface.attention import attention_forward

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
COPIES = ("aten::copy_", "aten::clone", "aten::repeat_interleave", "aten::cat")
BATCH, SEQLEN, HEADS, KV_HEADS, HEAD_DIM = 2, 32, 8, 2, 32


class Layer(torch.nn.Module):
    """Attention between projections, as a Llama has it, but for its rotation."""

    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.of_query = torch.nn.Linear(width, width, bias=False)
        self.of_key = torch.nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)
        self.of_value = torch.nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)
        self.of_output = torch.nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            projection(hidden).view(BATCH, SEQLEN, -1, HEAD_DIM).transpose(1, 2)
            for projection in (self.of_query, self.of_key, self.of_value)
        )
        output, _ = attention_forward(self, query, key, value, None, scaling=HEAD_DIM**-0.5)
        result: torch.Tensor = self.of_output(output.reshape(BATCH, SEQLEN, -1).contiguous())
        return result


def operations(work: Any) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return Counter(event.name for event in profile.events())


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_step_copies_nothing(device: str) -> None:
    """Neither what goes in, nor heads, nor the output, nor the gradients on their way back to the projections."""
    layer = Layer().to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    hidden = torch.randn(BATCH, SEQLEN, HEADS * HEAD_DIM, device=device, dtype=layer.of_query.weight.dtype)
    weights = torch.randn_like(hidden)

    def step() -> None:
        layer(hidden).backward(weights)

    flashmoe_science.reset_report()
    try:
        step()  # kernels, and gradients to add to
    except flashmoe_science.DeviceError as error:
        pytest.skip(str(error))
    for parameter in layer.parameters():
        parameter.grad = None
    counted = operations(step)
    assert flashmoe_science.report().reasons(Entry.HUGGING_FACE_ATTENTION) == {}
    assert counted["aten::transpose"] > 0  # the profiler saw the step
    assert {name: counted[name] for name in COPIES if counted[name]} == {}
    expanded = operations(lambda: layer.of_query.weight.t().contiguous())
    assert expanded["aten::clone"] == 1  # and would have seen a copy
