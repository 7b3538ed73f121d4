"""What the tests of attention on the CPU share."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from attention_gradients import Case

from flashmoe_science.cpu import attention
from flashmoe_science.gradients import Gradients, Needs
from flashmoe_science.jit.host import InstructionSet
from instruction_sets import each_instruction_set as each_instruction_set

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = Needs(query=True, key=True, value=True)

each_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


class GuardedMemory:
    """A tensor that ends (or starts) right at a page that cannot be touched."""

    def __init__(self, tensor: torch.Tensor, at_end: bool) -> None:
        page = mmap.PAGESIZE
        size = tensor.numel() * tensor.element_size()
        pages = -(-size // page)
        self._map = mmap.mmap(-1, (pages + 2) * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        for guard in (base, base + (pages + 1) * page):
            assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
        offset = page + (pages * page - size if at_end else 0)
        flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        self.tensor = flat.view(tensor.shape).copy_(tensor)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    instruction_set: InstructionSet | None = None,
) -> torch.Tensor:
    return attention.forward(
        query,
        key,
        value,
        causal=causal,
        softmax_scale=scale,
        return_lse=False,
        instruction_set=instruction_set,
    )[0]


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def inputs(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        normal(batch, heads, seqlen_q, head_dim, dtype=dtype, seed=1),
        normal(batch, kv_heads, seqlen_k, head_dim, dtype=dtype, seed=2),
        normal(batch, kv_heads, seqlen_k, head_dim, dtype=dtype, seed=3),
    )


def forward(case: Case, instruction_set: InstructionSet | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = attention.forward(
        case.query,
        case.key,
        case.value,
        causal=case.causal,
        softmax_scale=case.softmax_scale,
        return_lse=True,
        instruction_set=instruction_set,
    )
    assert lse is not None
    return output, lse


def backward(
    case: Case,
    output: torch.Tensor,
    lse: torch.Tensor,
    needs: Needs = ALL,
    instruction_set: InstructionSet | None = None,
) -> Gradients:
    return attention.backward(
        case.grad_output,
        case.query,
        case.key,
        case.value,
        output,
        lse,
        case.grad_lse,
        causal=case.causal,
        softmax_scale=case.softmax_scale,
        needs=needs,
        instruction_set=instruction_set,
    )


def gradients_of(
    case: Case, instruction_set: InstructionSet | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = backward(case, *forward(case, instruction_set), ALL, instruction_set)
    assert query is not None
    assert key is not None
    assert value is not None
    return query, key, value


class Threads:
    """So many threads for PyTorch, and so for the kernel, while it is entered."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self.before)
