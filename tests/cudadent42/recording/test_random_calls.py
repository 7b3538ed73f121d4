"""Any call of PyTorch's attention is recorded as it is, and becomes a suite that has its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recordings import SOURCE, only, record
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashmoe_science
from cudadent42.operations import numerics
from cudadent42.plan import make_case
from cudadent42.recording.problems import suite_strides
from cudadent42.recording.records import Recording
from cudadent42.recording.suite import suites
from cudadent42.suites.loader import parse_suite

sizes = st.integers(1, 5)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Calls that PyTorch takes: layouts, masks, grouped heads, gradients, dtypes."""
    batch, kv_heads, groups = draw(sizes), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seqlen_q, seqlen_k = draw(sizes), draw(sizes)
    head_dim = draw(st.sampled_from([8, 16, 24, 12]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    seed = draw(st.integers(0, 2**31))
    grad = draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)

    def tensor(heads: int, length: int) -> torch.Tensor:
        layout = draw(st.sampled_from(["dense", "rows first", "packed", "cache", "expanded"]))
        if layout == "rows first":
            made = torch.randn(batch, length, heads, head_dim, generator=generator).transpose(1, 2)
        elif layout == "packed":
            made = torch.randn(batch, length, 3, heads, head_dim, generator=generator)[:, :, 1].transpose(
                1, 2
            )
        elif layout == "cache":
            made = torch.randn(batch, heads, length + 3, head_dim, generator=generator)[:, :, :length]
        elif layout == "expanded":
            made = torch.randn(1, 1, length, head_dim, generator=generator).expand(batch, heads, -1, -1)
        else:
            made = torch.randn(batch, heads, length, head_dim, generator=generator)
        made = made.to(dtype) if dtype is not torch.float32 else made
        return made.requires_grad_() if grad else made

    mask = draw(st.sampled_from([None, "bool", "added", "padding", "upper", "lower"]))
    masks: dict[Any, Any] = {
        None: None,
        "bool": torch.ones(seqlen_q, seqlen_k, dtype=torch.bool),
        "added": torch.zeros(seqlen_q, seqlen_k, dtype=dtype),
        "padding": torch.ones(batch, 1, 1, seqlen_k, dtype=torch.bool),
        "upper": causal_upper_left(seqlen_q, seqlen_k),
        "lower": causal_lower_right(seqlen_q, max(seqlen_q, seqlen_k)),
    }
    if mask == "lower":
        seqlen_k = max(seqlen_q, seqlen_k)
    return {
        "query": tensor(kv_heads * groups, seqlen_q),
        "key": tensor(kv_heads, seqlen_k),
        "value": tensor(kv_heads, seqlen_k),
        "attn_mask": masks[mask],
        "is_causal": mask is None and draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.3])),
        "enable_gqa": groups > 1,
    }


@given(arguments=calls(), repeats=st.integers(1, 3))
def test_any_call_is_the_same_counted_and_described(arguments: dict[str, Any], repeats: int) -> None:
    expected = functional.scaled_dot_product_attention(**arguments)

    def script() -> torch.Tensor:
        for _ in range(repeats):
            output = functional.scaled_dot_product_attention(**arguments)
            if output.requires_grad:
                output.sum().backward()
        return output

    recording, output = record(script)
    assert torch.equal(expected, output)
    group = only(recording)
    assert group.calls == repeats
    assert group.backward_calls == (repeats if expected.requires_grad else 0)
    assert not group.ours
    assert 0 < group.seconds + group.backward_seconds <= recording.seconds
    taken = takes(arguments)
    if arguments["attn_mask"] is not None and type(arguments["attn_mask"]) is torch.Tensor:
        assert "mask" in str(group.reason) or not taken
    else:
        assert (group.reason is None) is taken
    if group.reason is None:
        check_case(recording, arguments)


def takes(arguments: dict[str, Any]) -> bool:
    """By the takeover itself."""
    flashmoe_science.reset_report()
    with flashmoe_science.sdpa():
        functional.scaled_dot_product_attention(**arguments)
    report = flashmoe_science.report()
    # A mask object that says what it is comes to PyTorch's function more than once.
    return report.taken > 0 and report.declined == 0


def check_case(recording: Recording, arguments: dict[str, Any]) -> None:
    """The suite's tensors are the call's: shapes, strides, dtype, scale and mask."""
    written = suites([recording], SOURCE, "captured")
    (text,) = written.texts.values()
    suite = parse_suite(text, "here")
    (shape,) = suite.shapes
    case: Any = make_case(shape, suite.dtypes[0].value)
    (inputs,) = numerics(case).input_sets(case, 1, 1, "cpu")
    causal = arguments["is_causal"] or arguments["attn_mask"] is not None
    assert case.causal is causal
    # Top-left, the keys behind the last query are seen by none.
    cut = causal and getattr(arguments["attn_mask"], "variant", None) is not causal_lower_right(1, 2).variant
    length = min(arguments["query"].shape[2], arguments["key"].shape[2]) if cut else None
    for name in ("query", "key", "value"):
        made, asked = getattr(inputs, name), arguments[name]
        asked = asked[:, :, :length] if cut and name != "query" else asked
        assert made.shape == asked.shape
        assert made.dtype == asked.dtype
        strides = suite_strides(tuple(asked.shape), asked.stride())
        if strides is None:
            assert "strides of 0" in text
        else:
            told = [number for number in range(4) if asked.shape[number] > 1]
            assert [made.stride(each) for each in told] == [asked.stride(each) for each in told]
    expected = arguments["scale"] or asked.shape[3] ** -0.5
    assert (inputs.softmax_scale or asked.shape[3] ** -0.5) == pytest.approx(expected)
