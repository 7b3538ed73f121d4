"""cuDNN as a peer of attention over pages: the graph that it is asked for says what the case is."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudadent42.model.implementations import UnsupportedCaseError
from cudadent42.operations.attention_varlen.case import VarlenCase
from cudadent42.operations.attention_varlen.implementations import ALL
from cudadent42.operations.attention_varlen.inputs import random_inputs
from cudadent42.operations.attention_varlen.reference import varlen_float64

CASE = VarlenCase("unit", "bf16", 5, 4, 2, longest=60, shortest=7, head_dim=16, page_size=8)
PEER = next(each for each in ALL if each.name == "cudnn")


class Output:
    def set_output(self, is_output: bool) -> Output:
        assert is_output
        return self

    def set_dim(self, sizes: list[int]) -> Output:
        self.sizes = sizes
        return self

    def set_stride(self, strides: list[int]) -> Output:
        self.strides = strides
        return self


class Graph:
    """Computes what it was asked for, by the definition that cuDNN documents."""

    def __init__(self, **types: object) -> None:
        self.built: list[str] = []

    def tensor_like(self, tensor: torch.Tensor) -> object:
        return object()

    def sdpa(self, **asked: Any) -> tuple[Output, None]:
        self.asked, self.output = asked, Output()
        return self.output, None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.built.append(name) or 1

    def execute(self, tensors: dict[object, torch.Tensor], workspace: torch.Tensor, handle: object) -> None:
        assert self.built[-2:] == ["build_plans", "get_workspace_size"]
        of = {
            name: tensors[value]
            for name, value in self.asked.items()
            if not isinstance(value, bool | float | int | str)
        }
        output = tensors[self.output]
        assert (self.output.sizes, self.output.strides) == (list(output.shape), list(output.stride()))
        table = of["paged_attention_k_table"]
        assert table is of["paged_attention_v_table"]
        assert table.shape == (CASE.batch, 1, table.shape[2], 1)
        for index, keys in enumerate(of["seq_len_kv"].flatten().tolist()):
            query = of["q"][index].double()
            group = query.shape[0] // of["k"].shape[1]

            def rows(name: str, keys: int = keys, index: int = index, group: int = group) -> torch.Tensor:
                pages = of[name][table[index, 0, :, 0].long()].transpose(0, 1).flatten(1, 2)
                return pages[:, :keys].double().repeat_interleave(group, 0)

            scores = query @ rows("k").transpose(1, 2) * self.asked["attn_scale"]
            queries = query.shape[1]
            if self.asked["use_causal_mask_bottom_right"]:
                hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
                scores = scores.masked_fill(hidden, -math.inf)
            output[index].copy_(torch.softmax(scores, -1) @ rows("v"))


class NotSupportedError(Exception):
    """What cuDNN raises for a graph that it does not support."""


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(
        data_type=SimpleNamespace(HALF=1, BFLOAT16=2, FLOAT=3),
        heur_mode=SimpleNamespace(A=0),
        cudnnGraphNotSupportedError=NotSupportedError,
        create_handle=object,
        set_stream=lambda handle, stream: None,
        pygraph=Graph,
    )
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return module


@pytest.mark.parametrize("case", [CASE, replace(CASE, queries=4), replace(CASE, queries=3, causal=False)])
def test_it_computes_the_case(case: VarlenCase, cudnn: SimpleNamespace) -> None:
    inputs = random_inputs(case, 0, 0, "cpu")
    call = PEER.prepare(case, inputs)
    for _ in range(2):
        error = (call().double() - varlen_float64(case, inputs, lambda: None)).abs().max()
        assert error < 0.02


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 0},
        {"fp8_scales": "head"},
        {"queries": 4, "tree": "star"},
        {"sinks": True},
        {"softcap": 2.0},
        {"window": 5},
        {"alibi": True},
        {"value_dim": 8},
        {"chunks": 1, "chunk": 5},
        {"shortest": 0, "longest": 3, "batch": 8},
    ],
    ids=str,
)
def test_what_it_is_not_asked_for(changes: dict[str, Any], cudnn: SimpleNamespace) -> None:
    case = replace(CASE, **changes)
    with pytest.raises(UnsupportedCaseError, match="cuDNN"):
        PEER.prepare(case, random_inputs(case, 0, 0, "cpu"))


def test_a_graph_that_cudnn_does_not_support_is_said(
    cudnn: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: Graph) -> None:
        raise NotSupportedError("no plan\nfor it")

    monkeypatch.setattr(Graph, "check_support", refuse, raising=False)
    with pytest.raises(UnsupportedCaseError, match="cuDNN: no plan for it"):
        PEER.prepare(CASE, random_inputs(CASE, 0, 0, "cpu"))
