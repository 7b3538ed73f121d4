"""The takeover on a GPU: where PyTorch would choose cuDNN, flash or others, and a mask's contents are far away."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sdpa_calls import SdpaCall, make_call
from torch.nn import attention

import flashmoe_science
from flashmoe_science.takeover import implementation
from flashmoe_science.takeover.counts import Entry

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _report() -> None:
    flashmoe_science.reset_report()


def on_gpu(call: SdpaCall) -> SdpaCall | None:
    """The call in half precision on the GPU; None for one that is about something of the CPU."""
    tensors = [call.query, call.key, call.value]
    odd = any(each.is_meta or each.is_nested or not each.is_floating_point() for each in tensors)
    # PyTorch 2.11 crashes at the second call whose queries and keys differ in their last size: cuDNN refused the first.
    odd = odd or call.query.shape[-1] != call.key.shape[-1]
    if odd or call.around == "autocast" or call.options.get("dropout_p"):
        return None
    moved = []
    for tensor in tensors:
        kept = torch.empty_like(tensor, dtype=torch.bfloat16, device="cuda").copy_(tensor.detach())
        moved.append(kept.requires_grad_(tensor.requires_grad))
    mask = call.options.get("attn_mask")
    options = dict(call.options)
    if type(mask) is torch.Tensor:
        options["attn_mask"] = mask.cuda() if mask.dtype is torch.bool else mask.cuda().bfloat16()
    return SdpaCall(*moved, options=options, around=call.around)


def result(call: SdpaCall) -> Any:
    try:
        output = call()
        wanted = [tensor for tensor in (call.query, call.key, call.value) if tensor.requires_grad]
        if not wanted or not output.requires_grad:
            return (output,)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
        return output.detach(), *torch.autograd.grad(output, wanted, weights)
    except Exception as error:  # noqa: BLE001 any that PyTorch raises is to be raised again
        return type(error)


def test_calls_agree() -> None:
    taken = 0
    for seed in range(400):
        call = on_gpu(make_call(seed))
        if call is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = result(call)
            with flashmoe_science.sdpa():
                before = flashmoe_science.report().taken
                ours = result(call)
                is_taken = flashmoe_science.report().taken > before
            if isinstance(plain, type) or isinstance(ours, type):
                assert ours == plain, seed
                continue
            if not is_taken:
                continue
            taken += 1
            exact = result(call.exact())
        for one, other, right in zip(ours, plain, exact, strict=False):
            error, allowed = ((each - right).norm() for each in (one, other))
            assert error <= 1.5 * allowed + 2**-8 * (1 + right.norm()), seed
    assert taken > 100


def test_the_call_is_taken_before_pytorch_chooses_cudnn() -> None:
    query = torch.randn(1, 8, 256, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with flashmoe_science.sdpa():
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    assert flashmoe_science.report().taken == 1


@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_implementation_is_what_pytorch_calls(head_dim: int) -> None:
    """Whichever of its kernels it would choose: cuDNN's on Hopper, flash elsewhere and for large head dims."""
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("this PyTorch cannot restore its own")
    tensors = [
        torch.randn(2, 8, 256, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in range(3)
    ]

    def call() -> list[torch.Tensor]:
        output = F.scaled_dot_product_attention(*tensors, is_causal=True)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), tensors)]

    expected = call()
    flashmoe_science.register_flash_attention_impl()
    attention.activate_flash_attention_impl(implementation.NAME)
    try:
        ours = call()
    finally:
        attention.restore_flash_attention_impl()
    (count,) = flashmoe_science.report().counts
    assert (count.entry, count.calls, count.declined) == (Entry.FLASH_IMPLEMENTATION, 2, None)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())


def test_a_mask_of_many_queries_is_waited_for_once() -> None:
    """Few queries are taken by lists, which wait for nothing."""
    query = torch.randn(2, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool, device="cuda")
    mask[..., 100:] = False
    expected = F.scaled_dot_product_attention(query, query, query, mask)
    with flashmoe_science.sdpa():
        F.scaled_dot_product_attention(query, query, query, mask)
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = F.scaled_dot_product_attention(query, query, query, mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        mask[0, ..., 50:] = False  # read again, and declined: the sequences differ
        F.scaled_dot_product_attention(query, query, query, mask)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    assert flashmoe_science.report().taken == 2
    assert flashmoe_science.report().reasons() == {"a mask with different lengths on a GPU": 1}


def test_a_cuda_graph() -> None:
    query = torch.randn(1, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
    with flashmoe_science.sdpa():
        F.scaled_dot_product_attention(query, query, query)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = F.scaled_dot_product_attention(query, query, query)
    query.normal_()
    graph.replay()
    torch.testing.assert_close(
        output, F.scaled_dot_product_attention(query, query, query), rtol=2e-2, atol=2e-2
    )
    assert flashmoe_science.report().taken == 2
