"""Results for parts of the keys, merged."""

from __future__ import annotations

import math

import pytest
import torch
from varlen_cases import Shape, bounds, packed
from varlen_reference import exact_varlen

from flashmoe_science import InputError, attention_varlen, merge_attention

SHAPE = Shape((7, 2), (40, 9), value_dim=16)


def parts(
    sinks: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps for keys up to the 9th of each sequence and behind it; both for all keys, in float64."""
    shape = Shape(SHAPE.queries, SHAPE.keys, value_dim=16, dtype=dtype)
    call = packed(shape)
    exact, exact_lse = exact_varlen(**call, causal=False, sinks=sinks)
    outs, lses = [], []
    for rows, starts in ((range(0, 9), [0, 9, 18]), (range(9, 40), [0, 31, 31])):
        chosen = [first + row for first, length in ((0, 40), (40, 9)) for row in rows if row < length]
        part = {**call, "key": call["key"][chosen], "value": call["value"][chosen]}
        part["cu_seqlens_k"] = torch.tensor(starts, dtype=torch.int32)
        out, lse = attention_varlen(**part, **bounds(SHAPE), causal=False, return_lse=True)  # type: ignore[arg-type]
        outs.append(out)
        lses.append(lse)
    return outs, lses, exact, exact_lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sink", [None, 1.5])
def test_parts_make_the_whole(sink: float | None, dtype: torch.dtype) -> None:
    sinks = None if sink is None else torch.full((4,), sink)
    outs, lses, exact, exact_lse = parts(sinks, dtype)
    merged, lse = merge_attention(outs, lses, sinks=sinks)
    assert merged.dtype == dtype
    tolerance = 1e-6 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(merged.double(), exact, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    out = torch.empty_like(merged)
    assert merge_attention(outs, lses, sinks=sinks, out=out)[0] is out
    assert torch.equal(out, merged)
    assert torch.equal(merge_attention(torch.stack(outs), torch.stack(lses), sinks=sinks)[0], merged)  # type: ignore[arg-type]


def test_a_part_without_keys_changes_nothing_whatever_is_in_it() -> None:
    outs, lses, _, _ = parts()
    nothing = torch.full_like(outs[0], math.nan), torch.full_like(lses[0], -math.inf)
    merged, lse = merge_attention([*outs, nothing[0]], [*lses, nothing[1]])
    assert torch.equal(merged, merge_attention(outs, lses)[0])
    assert torch.equal(lse, merge_attention(outs, lses)[1])
    empty, lse = merge_attention([nothing[0]], [nothing[1]], sinks=torch.zeros(4))
    assert (empty == 0).all()
    assert (lse == -math.inf).all()


def test_what_does_not_fit_is_refused() -> None:
    outs, lses, _, _ = parts()
    for arguments, message in (
        (([], []), "at least one part"),
        ((outs, lses[:1]), "2 tensors and lses 1"),
        (([outs[0], outs[1].half()], lses), r"outs\[1\] is torch.float16"),
        ((torch.stack(outs), torch.stack(lses)[:1]), "2 tensors and lses 1"),
        (([outs[0], outs[1].to("meta")], lses), r"outs\[1\] is torch.float32 on meta"),
        ((outs, [lses[0], lses[1].to("meta")]), r"lses\[1\] is on meta but outs\[0\] is on cpu"),
        ((outs, [lses[0], lses[1].T]), r"lses\[1\] has shape \(4, 9\)"),
    ):
        with pytest.raises(InputError, match=message):
            merge_attention(*arguments)
    with pytest.raises(InputError, match=r"sinks has shape \(3,\)"):
        merge_attention(outs, lses, sinks=torch.zeros(3))
    with pytest.raises(InputError, match="sinks is on meta"):
        merge_attention(outs, lses, sinks=torch.zeros(4, device="meta"))
