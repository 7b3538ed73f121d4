"""Calls whose arguments make no sense, drawn at random: each is computed or refused in one line, and none ends the
process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flashmoe_science as ours
from flashmoe_science.adapters import flash_attn, torch_varlen
from flashmoe_science.varlen.append import slots_of
from flashmoe_science.varlen.transform import Rotary

INT32, FP8 = torch.int32, torch.float8_e4m3fn
CALLS = 250
"""Of each function."""


def starts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT32)


def packed() -> dict[str, Any]:
    return {
        "query": torch.randn(5, 4, 16),
        "key": torch.randn(9, 2, 16),
        "value": torch.randn(9, 2, 16),
        "cu_seqlens_q": starts(0, 3, 5),
        "cu_seqlens_k": starts(0, 4, 9),
        "max_seqlen_q": 3,
        "max_seqlen_k": 5,
        "causal": True,
        "window": (-1, -1),
        "softcap": 0.0,
        "sinks": None,
        "alibi_slopes": None,
        "softmax_scale": None,
        "out": None,
        "return_lse": False,
        "split_keys": None,
        "chunk": 0,
        "tree_mask": None,
    }


def paged() -> dict[str, Any]:
    return packed() | {
        "key": torch.randn(4, 8, 2, 16),
        "value": torch.randn(4, 8, 2, 16),
        "cu_seqlens_k": None,
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=INT32),
        "seqused_k": starts(10, 16),
    }


def in_fp8() -> dict[str, Any]:
    call = paged()
    small = {name: call[name].to(FP8) for name in ("key", "value")}
    scales = {"key_scale": torch.ones(4, 8, 2), "value_scale": torch.ones(2)}
    return call | small | scales | {"query": call["query"].half()}


def dense() -> dict[str, Any]:
    return {
        "query": torch.randn(2, 4, 5, 16),
        "key": torch.randn(2, 2, 7, 16),
        "value": torch.randn(2, 2, 7, 16),
        "causal": False,
        "softmax_scale": None,
        "return_lse": True,
        "window": (3, 1),
        "softcap": 2.0,
        "sinks": torch.randn(4),
    }


def append() -> dict[str, Any]:
    return {
        "key": torch.randn(3, 2, 16),
        "value": torch.randn(3, 2, 8),
        "key_cache": torch.randn(4, 8, 2, 16),
        "value_cache": torch.randn(4, 8, 2, 8),
        "slot_mapping": torch.tensor([3, -1, 31]),
        "query": torch.randn(3, 4, 16),
        "rotary": Rotary(torch.randn(9, 8), torch.tensor([0, 8, 3])),
        "query_norm": torch.randn(16),
        "key_norm": torch.randn(16),
        "eps": 1e-6,
    }


def append_fp8() -> dict[str, Any]:
    call = append()
    small = {name: call[name].to(FP8) for name in ("key_cache", "value_cache")}
    return call | small | {"key_scale": torch.ones(4, 8, 2), "value_scale": torch.tensor(0.5)}


def merge() -> dict[str, Any]:
    outs, lses = [torch.randn(3, 4, 8) for _ in range(2)], [torch.randn(3, 4) for _ in range(2)]
    return {"outs": outs, "lses": lses, "sinks": torch.randn(4), "out": None}


def slots() -> dict[str, Any]:
    table = torch.tensor([[0, 1], [2, 3]], dtype=INT32)
    return {
        "block_table": table,
        "page_size": 4,
        "sequence": torch.tensor([0, 1]),
        "position": torch.tensor([3, 7]),
    }


def cache() -> dict[str, Any]:
    return {
        "q": torch.randn(2, 1, 4, 16),
        "k_cache": torch.randn(2, 9, 2, 16),
        "v_cache": torch.randn(2, 9, 2, 16),
        "k": torch.randn(2, 1, 2, 16),
        "v": torch.randn(2, 1, 2, 16),
        "cache_seqlens": starts(3, 4),
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "sinks": None,
        "return_softmax_lse": True,
        "rotary_cos": torch.randn(9, 4),
        "rotary_sin": torch.randn(9, 4),
        "rotary_interleaved": True,
        "num_splits": 0,
    }


def under_flash_attentions_name() -> dict[str, Any]:
    return {
        "q": torch.randn(5, 4, 16),
        "k": torch.randn(9, 2, 16),
        "v": torch.randn(9, 2, 16),
        "cu_seqlens_q": starts(0, 3, 5),
        "cu_seqlens_k": starts(0, 4, 9),
        "max_seqlen_q": 3,
        "max_seqlen_k": 5,
        "softmax_scale": None,
        "causal": True,
        "window_size": (2, 0),
        "alibi_slopes": torch.randn(4),
        "s_aux": torch.randn(4),
        "return_attn_probs": True,
    }


def under_pytorchs_name() -> dict[str, Any]:
    return {
        "query": torch.randn(5, 4, 16),
        "key": torch.randn(9, 4, 16),
        "value": torch.randn(9, 4, 16),
        "cu_seq_q": starts(0, 3, 5),
        "cu_seq_k": starts(0, 4, 9),
        "max_q": 3,
        "max_k": 5,
        "window_size": (-1, 0),
        "scale": None,
        "enable_gqa": False,
    }


FUNCTIONS: list[tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = [
    (ours.attention_varlen, packed),
    (ours.attention_varlen, paged),
    (ours.attention_varlen, in_fp8),
    (ours.flash_attention, dense),
    (ours.paged_append, append),
    (ours.paged_append, append_fp8),
    (ours.merge_attention, merge),
    (slots_of, slots),
    (flash_attn.flash_attn_with_kvcache, cache),
    (flash_attn.flash_attn_varlen_func, under_flash_attentions_name),
    (torch_varlen.varlen_attn, under_pytorchs_name),
]
NO_TENSORS: list[Any] = [
    *(
        None,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**70),
        1.5,
        float("nan"),
        float("inf"),
        True,
        1j,
        128,
        130,
        1e-40,
        1e40,
    ),
    *(
        "x",
        b"a",
        [],
        (),
        (1,),
        [1, 2],
        (0, 0),
        (2**40, 0),
        ("a", 0),
        (None, None),
        {},
        range(3),
        torch.float32,
    ),
    *(np.int64(3), np.float32(2), np.array([1, 2])),
]
CHANGES: list[Callable[[torch.Tensor], Any]] = [
    lambda tensor: tensor.to(torch.int64),
    lambda tensor: tensor.to(torch.bfloat16),
    lambda tensor: tensor.to(torch.float8_e5m2) if tensor.is_floating_point() else tensor.to(torch.bool),
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor.unsqueeze(0),
    lambda tensor: tensor[:0] if tensor.dim() else tensor,
    lambda tensor: tensor[..., :0] if tensor.dim() else tensor,
    lambda tensor: tensor.flatten(),
    lambda tensor: tensor.float().to(torch.complex64),
    lambda tensor: tensor.float().to_sparse(),
    lambda tensor: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]),
    lambda tensor: torch.nested.nested_tensor([torch.zeros(2, 3)] * 2, layout=torch.jagged),
    lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    lambda tensor: tensor.float().requires_grad_(),
    lambda tensor: torch.zeros((), dtype=tensor.dtype),
    lambda tensor: tensor.new_zeros(tuple(size + 1 for size in tensor.shape)),
    lambda tensor: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape),
    lambda tensor: torch.full(tensor.shape, 60_000).to(tensor.dtype),
    lambda tensor: torch.full(tensor.shape, -5).to(tensor.dtype),
    lambda tensor: [tensor],
]


def wild(draws: random.Random, argument: Any) -> Any:
    if isinstance(argument, Rotary) and draws.random() < 0.7:
        parts = list(argument)
        index = draws.randrange(3)
        parts[index] = wild(draws, parts[index])
        return Rotary(*parts)
    if isinstance(argument, list) and draws.random() < 0.6:
        return [argument[0], wild(draws, argument[1])]
    if draws.random() < 0.4:
        return draws.choice(NO_TENSORS)
    return draws.choice(CHANGES)(argument if isinstance(argument, torch.Tensor) else torch.zeros(2, 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("function", "make"), FUNCTIONS, ids=[make.__name__ for _, make in FUNCTIONS])
def test_is_computed_or_refused_in_one_line(
    function: Callable[..., Any], make: Callable[[], dict[str, Any]]
) -> None:
    function(**make())
    refused: list[str] = []
    for seed in range(CALLS):
        draws = random.Random(seed)
        arguments = make()
        for name in draws.sample(sorted(arguments), draws.choice([1, 1, 2, 3])):
            arguments[name] = wild(draws, arguments[name])
        try:
            function(**arguments)
        except (ours.InputError, ours.DeviceError) as error:
            refused.append(str(error))
    assert len(refused) > CALLS // 3
    assert [message for message in refused if "\n" in message] == []
