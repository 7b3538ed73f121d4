"""Functions outside torch.compile's graphs, with and without the private way."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from flashmoe_science import untraced


@pytest.mark.parametrize("private", [True, False])
def test_a_function_is_a_graph_break_in_every_torch(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not private:
        monkeypatch.setitem(sys.modules, "torch._compile", None)  # importing it raises ImportError
    module = importlib.reload(untraced)
    try:
        seen: list[bool] = []

        def function(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_dynamo_compiling())
            return tensor + 1

        wrapped = module.untraced(function)
        torch.compiler.reset()
        compiled = torch.compile(lambda tensor: wrapped(tensor * 2) * 3, backend="eager")
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 9.0))
        assert seen == [False]
    finally:
        monkeypatch.undo()
        importlib.reload(untraced)
