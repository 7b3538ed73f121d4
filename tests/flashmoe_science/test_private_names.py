"""What PyTorch does not promise to keep: which of it is used, why, and that calls are right without it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

import bare_torch
from module_graph import files_of, nodes_of

FILES = files_of("flashmoe_science")
GATHERED = "flashmoe_science.torch_private"
"""The module whose names have a stand-in."""

ELSEWHERE = {
    "torch._C._AutoDispatchBelowAutograd": "autograd's key of an operator ends in it, as torch.library's own does",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "asked by register_flash_attention_impl, once",
    "torch._C._nn.scaled_dot_product_attention": "what sdpa() stands in for; torch.nn.functional binds it",
    "torch._functorch.utils.enable_single_level_autograd_function": "gradients under torch.func's transforms",
    "torch._ops.OpOverload": "a type",
    "torch.autograd.forward_ad._set_fwd_grad_enabled": "tangents under torch.func's transforms",
    "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator": "how a call of DTensors is known again",
    "torch.distributed.tensor._op_schema.RuntimeSchemaInfo": "the same: which arguments it compares",
    "torch.jit._builtins": "torch.jit.script of a function that sdpa() replaced",
    "torch.jit._builtins._register_builtin": "torch.jit.script of a function that sdpa() replaced",
    "torch.utils._device.DeviceContext": "asked where a function mode is on",
}
"""Private names that are used without a stand-in, each with what for."""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of names and attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def private_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Those of PyTorch that a module names. What ``getattr`` asks for with a default is not one of them."""
    bound: dict[str, str] = {}
    inner: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            inner.add(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) == 3:
            inner.add(node.args[0])
    for node in nodes:
        if isinstance(node, ast.Attribute) and node not in inner and (name := dotted(node)):
            first, _, rest = name.partition(".")
            if first in bound:
                yield f"{bound[first]}.{rest}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C._f()", ["torch._C._f"]),
        ("import torch._ops", ["torch._ops"]),
        ("from torch._ops import Overload", ["torch._ops.Overload"]),
        ("from torch.a import _f", ["torch.a._f"]),
        ("from torch import a\na._f.b", ["torch.a._f.b"]),
        ("import torch\ngetattr(torch._C, '_f', None)", []),
        ("import torch\ngetattr(torch._C, '_f')", ["torch._C"]),
        ("import torch\ntorch.__version__", []),
        ("import other\nother._f", []),
    ],
)
def test_a_private_name_is_seen_however_it_is_written(source: str, expected: list[str]) -> None:
    assert [name for name in private_names(list(ast.walk(ast.parse(source)))) if is_private(name)] == expected


def test_private_names_of_pytorch_have_a_stand_in_or_a_reason() -> None:
    used = {
        name
        for module, path in FILES.items()
        if module != GATHERED
        for name in private_names(nodes_of(path))
        if is_private(name)
    }
    assert used == set(ELSEWHERE)


WITHOUT = """
import torch, torch._dynamo  # which takes the names that it needs
from types import ModuleType
from torch.autograd import forward_ad
from torch.nn import functional

for name in ("_is_tracing", "_len_torch_dispatch_stack", "_len_torch_function_stack", "_get_function_stack_at",
             "_get_flash_sdp_enabled", "_is_any_autocast_enabled"):
    delattr(torch._C, name)
del torch._C._functorch.peek_interpreter_stack, torch._C._dynamo.guards._empty_strided_cpu
torch.autograd.forward_ad = ModuleType("forward_ad")  # PyTorch's own functions keep theirs
vars(torch.autograd.forward_ad).update({k: v for k, v in vars(forward_ad).items() if k != "_current_level"})
torch.jit.is_tracing = lambda: False  # PyTorch's own asks the private one
torch.backends.cuda.flash_sdp_enabled = lambda: True

import flashmoe_science as ours
from flashmoe_science import direct

query, key, value = (torch.randn(1, 2, 24, 32, requires_grad=True) for _ in range(3))
assert not direct.all_direct(query.detach())
expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
result = ours.flash_attention(query, key, value, causal=True)
torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
upstream = torch.randn_like(result)
for mine, theirs in zip(*(torch.autograd.grad(y, (query, key, value), upstream) for y in (result, expected))):
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
with ours.sdpa():
    taken = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
torch.testing.assert_close(taken, expected, atol=1e-5, rtol=1e-5)

tokens, w13, w2 = torch.randn(5, 32), torch.randn(4, 64, 32), torch.randn(4, 32, 32)
weights, ids = ours.topk_routing(torch.randn(5, 4), 2)
experts = ours.fused_moe(tokens, w13, w2, weights, ids)
for row in range(5):
    by_hand = torch.zeros(32)
    for weight, index in zip(weights[row], ids[row].tolist()):
        gate, up = (w13[index] @ tokens[row]).chunk(2)
        by_hand += weight * (w2[index] @ (functional.silu(gate) * up))
    torch.testing.assert_close(experts[row], by_hand, atol=1e-3, rtol=1e-3)

starts = torch.tensor([0, 9, 24], dtype=torch.int32)
packed = [each[0].transpose(0, 1).detach() for each in (query, key, value)]
varlen = ours.attention_varlen(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=15, max_seqlen_k=15,
                               causal=False)
whole = functional.scaled_dot_product_attention(*(each[9:].transpose(0, 1) for each in packed))
torch.testing.assert_close(varlen[9:], whole.transpose(0, 1), atol=1e-5, rtol=1e-5)
print("right")
"""


def test_calls_are_right_without_what_has_a_stand_in() -> None:
    done = bare_torch.run(WITHOUT, compiler=True)
    assert (done.stdout, done.returncode) == ("right\n", 0), done.stderr
