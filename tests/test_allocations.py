"""Every tensor that the packages make names its dtype and its device.

After torch.set_default_dtype or torch.set_default_device (model loaders call them) one that does not is another tensor:
a float32 kernel once wrote past a bfloat16 buffer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from module_graph import nodes_of

SOURCE = Path(__file__).resolve().parents[1] / "src"
FACTORIES = {
    *("empty", "zeros", "ones", "full", "rand", "randn", "arange", "linspace", "eye", "tensor", "randint"),
    *("empty_strided", "randperm", "logspace", "tril_indices", "triu_indices", "hann_window", "normal"),
}


def unnamed(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines of calls of torch's factories without dtype or device."""
    lines = []
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        given = {keyword.arg for keyword in node.keywords}
        if node.func.attr in FACTORIES and None not in given and not {"dtype", "device"} <= given:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_allocations_name_dtype_and_device(path: Path) -> None:
    assert unnamed(nodes_of(path)) == []


def test_the_rule_sees_what_it_is_for() -> None:
    def seen(arguments: str) -> list[int]:
        return unnamed(ast.walk(ast.parse(f"import torch\ntorch.empty({arguments})")))

    assert seen("3, dtype=torch.float32") == [2]
    assert seen("3, device='cpu'") == [2]
    assert seen("3, dtype=torch.float32, device='cpu'") == []
