"""What autograd makes of attention: with a backend in float64 for differences, and with the CPU's kernels."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from attention_gradients import Case, ReferenceBackend, assert_within_bounds, random_case
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flashmoe_science import InputError, flash_attention
from flashmoe_science.autograd import differentiable_attention
from flashmoe_science.gradients import Gradients
from flashmoe_science.operators.attention import FORWARD


def float64_inputs(
    heads: int = 2, kv_heads: int = 1, seqlen_q: int = 4, seqlen_k: int = 5, needed: str = "qkv"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    case = random_case(1, heads, kv_heads, seqlen_q, seqlen_k, 8, torch.float64)
    query, key, value = (
        tensor.requires_grad_(name in needed)
        for name, tensor in zip("qkv", (case.query, case.key, case.value), strict=True)
    )
    return query, key, value


def by_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = differentiable_attention(
        ReferenceBackend(), query, key, value, causal=causal, softmax_scale=scale
    )
    assert lse is not None
    return out, lse


def inputs(requires_grad: bool = True, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    case = random_case(1, 4, 2, 40, 50, 32, torch.float32, **options)
    query, key, value = (
        tensor.requires_grad_(requires_grad) for tensor in (case.query, case.key, case.value)
    )
    return query, key, value


def output_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out = flash_attention(query, key, value, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("needed", ["qkv", "q", "k", "v", "qk", "kv", "qv"])
def test_gradients_by_differences_of_output_and_log_sum_exp(needed: str, causal: bool) -> None:
    tensors = float64_inputs(needed=needed)
    assert torch.autograd.gradcheck(lambda *each: by_reference(*each, causal), tensors)


@pytest.mark.parametrize("scale", [None, 0.7, -0.3])
def test_gradients_by_differences_of_grouped_heads_and_scales(scale: float | None) -> None:
    tensors = float64_inputs(heads=6, kv_heads=2)
    assert torch.autograd.gradcheck(lambda *each: by_reference(*each, scale=scale), tensors)


def test_gradients_by_differences_of_the_log_sum_exp_alone() -> None:
    tensors = float64_inputs()
    assert torch.autograd.gradcheck(lambda *each: by_reference(*each)[1], tensors)


def test_gradients_by_differences_through_broadcasting() -> None:
    """One key for every batch element, expanded before the call."""
    query = torch.randn(3, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    shared = torch.randn(1, 1, 5, 8, dtype=torch.float64, requires_grad=True)

    def function(query: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        key = shared.expand(3, 2, 5, 8)
        return by_reference(query, key, key)[0]

    assert torch.autograd.gradcheck(function, (query, shared))


def test_second_derivatives_are_refused_in_one_line() -> None:
    tensors = float64_inputs()
    with pytest.raises(InputError, match=r"first derivatives only; .*SDPBackend\.MATH") as raised:
        torch.autograd.gradgradcheck(lambda *each: by_reference(*each)[0], tensors)
    assert "\n" not in str(raised.value)


def test_what_second_derivatives_are_sent_to_is_the_same_attention() -> None:
    """Of unequal lengths with a causal mask, which SDPA's own aligns otherwise."""
    mask = torch.ones(4, 5, dtype=torch.bool).tril(1)

    def by_torch(*tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)

    tensors = float64_inputs()
    torch.testing.assert_close(
        by_torch(*tensors).float(), output_of(*(each.detach().float() for each in tensors))
    )
    assert torch.autograd.gradgradcheck(by_torch, tensors)


def test_second_derivatives_are_refused_also_where_the_incoming_gradient_is_constant() -> None:
    """A decorator that looks at the incoming gradient alone lets this one through, and terms are lost."""
    query, key, value = inputs()
    gradient = torch.autograd.grad(output_of(query, key, value).sum(), query, create_graph=True)[0]
    with pytest.raises(InputError, match="first derivatives only"):
        (gradient.square().sum() + query.sum()).backward()


def test_create_graph_alone_is_no_second_derivative() -> None:
    query, key, value = inputs()
    out = output_of(query, key, value)
    plain = torch.autograd.grad(out.sum(), (query, key, value), retain_graph=True)
    graph = torch.autograd.grad(out.sum(), (query, key, value), create_graph=True)
    assert all(torch.equal(*pair) for pair in zip(plain, graph, strict=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_without_the_log_sum_exp_as_a_result_gradients_have_the_same_bits(causal: bool) -> None:
    query, key, value = inputs()
    alone = flash_attention(query, key, value, causal=causal)
    out, _ = flash_attention(query, key, value, causal=causal, return_lse=True)
    assert isinstance(alone, torch.Tensor)
    assert isinstance(out, torch.Tensor)
    expected = torch.autograd.grad(out.square().sum(), (query, key, value))
    gradients = torch.autograd.grad(alone.square().sum(), (query, key, value))
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("needed", ["qkv", "q", "k", "v", "qk", "kv", "qv"])
def test_only_what_is_needed_is_computed(needed: str) -> None:
    asked = []

    class Watching(ReferenceBackend):
        @staticmethod
        def backward(*args: Any, needs: Any, **options: Any) -> Gradients:
            asked.append(needs)
            return ReferenceBackend.backward(*args, needs=needs, **options)

    tensors = float64_inputs(needed=needed)
    out, _ = differentiable_attention(Watching(), *tensors, causal=False, softmax_scale=None)
    out.sum().backward()
    assert asked == [tuple(name in needed for name in "qkv")]
    for name, tensor in zip("qkv", tensors, strict=True):
        assert (tensor.grad is not None) == (name in needed)


def test_what_is_kept_is_five_tensors() -> None:
    query, key, value = inputs()
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = output_of(query, key, value)
    assert [tuple(tensor.shape) for tensor in packed] == [
        *(tuple(tensor.shape) for tensor in (query, key, value, out)),
        tuple(out.shape[:3]),
    ]


def test_a_gradient_of_only_the_log_sum_exp_or_only_the_output() -> None:
    query, key, value = inputs()
    for which in (0, 1):
        case = Case(
            query.detach(), key.detach(), value.detach(), torch.zeros_like(query), torch.zeros(1, 4, 40)
        )
        outputs = flash_attention(query, key, value, return_lse=True)
        incoming = torch.randn_like(outputs[which])
        gradients = torch.autograd.grad(outputs[which], (query, key, value), incoming)
        case = Case(
            *(tensor.detach() for tensor in (query, key, value)),
            grad_output=incoming if which == 0 else torch.zeros_like(query),
            grad_lse=incoming if which == 1 else None,
        )
        assert_within_bounds(
            case, outputs[0].detach(), outputs[1].detach(), (gradients[0], gradients[1], gradients[2])
        )


def test_outputs_that_nothing_uses_give_no_gradients() -> None:
    query, key, value = inputs()
    output_of(query, key, value)
    (query * 2).sum().backward()
    assert key.grad is None
    assert query.grad is not None
    assert (query.grad == 2).all()


def test_retained_graphs_and_accumulation() -> None:
    query, key, value = inputs()
    loss = output_of(query, key, value).square().sum()
    loss.backward(retain_graph=True)
    once = [tensor.grad.clone() for tensor in (query, key, value) if tensor.grad is not None]
    loss.backward()
    for tensor, first in zip((query, key, value), once, strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("needed", ["qkv", "q", "kv"])
def test_several_gradients_at_a_time(needed: str, create_graph: bool) -> None:
    query, key, value = inputs()
    tensors = [each for name, each in zip("qkv", (query, key, value), strict=True) if name in needed]
    for each in (query, key, value):
        each.requires_grad_(any(each is one for one in tensors))
    results = flash_attention(query, key, value, return_lse=True)
    incoming = [torch.randn(3, *each.shape) for each in results]
    together = torch.autograd.grad(
        results, tensors, incoming, is_grads_batched=True, retain_graph=True, create_graph=create_graph
    )
    for index in range(3):
        given = [each[index] for each in incoming]
        alone = torch.autograd.grad(results, tensors, given, retain_graph=True)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[index], other)


@pytest.mark.parametrize("way", ["function", "operator"])
def test_what_hooks_restore_may_have_other_strides(way: str) -> None:
    def by_columns(tensor: torch.Tensor) -> torch.Tensor:
        dimensions = range(tensor.dim() - 1, -1, -1)
        return torch.empty(tensor.shape[::-1], dtype=tensor.dtype).permute(*dimensions).copy_(tensor)

    tensors = inputs()

    def gradients() -> tuple[torch.Tensor, ...]:
        out, lse = (
            flash_attention(*tensors, causal=True, return_lse=True)
            if way == "function"
            else FORWARD(*tensors, True)
        )
        return torch.autograd.grad(out.square().sum() + lse.sum(), tensors)

    with torch.autograd.graph.saved_tensors_hooks(by_columns, lambda tensor: tensor):
        turned = gradients()
    for one, other in zip(turned, gradients(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_saved_tensor_that_is_overwritten_is_noticed() -> None:
    query, key, value = inputs()
    out = output_of(query, key * 1, value)
    with torch.no_grad():
        query.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("return_lse", [False, True])
def test_an_output_that_was_changed_in_place_is_refused(return_lse: bool) -> None:
    query, key, value = inputs()
    results = flash_attention(query, key, value, return_lse=return_lse)
    out = results[0] if isinstance(results, tuple) else results
    loss = out.add_(1).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_tensor_as_query_key_and_value() -> None:
    tensor = inputs()[1].detach().requires_grad_()
    output_of(tensor, tensor, tensor).sum().backward()
    apart = [tensor.detach().clone().requires_grad_() for _ in range(3)]
    output_of(*apart).sum().backward()
    assert tensor.grad is not None
    torch.testing.assert_close(tensor.grad, sum(each.grad for each in apart if each.grad is not None))


def test_hooks_see_the_gradients() -> None:
    query, key, value = inputs()
    seen = []
    query.register_hook(seen.append)
    out = output_of(query, key, value)
    out.register_hook(lambda gradient: gradient * 2)
    out.sum().backward()
    assert torch.equal(seen[0], query.grad)
    plain = torch.autograd.grad(output_of(query, key, value).sum(), query)[0]
    torch.testing.assert_close(seen[0], 2 * plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant: bool) -> None:
    query, key, value = inputs()
    expected = torch.autograd.grad(output_of(query, key, value).sum(), (query, key, value))
    out = checkpoint(output_of, query, key, value, use_reentrant=reentrant)
    out.sum().backward()
    for tensor, gradient in zip((query, key, value), expected, strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, gradient)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_autograd_is_off(mode: Any) -> None:
    query, key, value = inputs()
    with mode():
        out, lse = flash_attention(query, key, value, return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad
    without = inputs(requires_grad=False)
    assert not output_of(*without).requires_grad
    assert torch.equal(out, flash_attention(*without))  # type: ignore[arg-type]


def test_gradients_of_views_and_layouts_reach_the_leaf() -> None:
    """The usual way to attention: one projection, split, heads brought forward."""
    projected = torch.randn(2, 30, 3, 4, 16, requires_grad=True)
    query, key, value = (each.transpose(1, 2) for each in projected.unbind(2))
    output_of(query, key, value).transpose(1, 2).reshape(2, 30, 64).square().sum().backward()
    assert projected.grad is not None
    apart = projected.detach().clone().requires_grad_()
    query, key, value = (each.transpose(1, 2).contiguous() for each in apart.unbind(2))
    output_of(query, key, value).square().sum().backward()
    assert apart.grad is not None
    assert torch.equal(projected.grad, apart.grad)


def test_backward_passes_from_several_threads() -> None:
    expected = torch.autograd.grad(output_of(*(tensors := inputs())).sum(), tensors)
    wrong = []

    def work() -> None:
        for _ in range(10):
            mine = inputs()
            gradients = torch.autograd.grad(output_of(*mine).sum(), mine)
            if not all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True)):
                wrong.append(gradients)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_compiled_code_has_the_gradients_of_eager_code() -> None:
    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (output_of(query * 2, key, value) + 1).square().sum()

    tensors, others = inputs(), inputs()
    expected = torch.autograd.grad(model(*tensors), tensors)
    gradients = torch.autograd.grad(torch.compile(model, backend="aot_eager")(*others), others)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_a_few_steps_of_training_follow_pytorchs_own_attention() -> None:
    def losses(attention: Any) -> list[float]:
        torch.manual_seed(3)
        embed, project = torch.nn.Linear(8, 96), torch.nn.Linear(32, 8)
        optimizer = torch.optim.SGD([*embed.parameters(), *project.parameters()], lr=0.5)
        data, target = torch.randn(4, 20, 8), torch.randn(4, 20, 8)
        history = []
        for _ in range(20):
            query, key, value = embed(data).view(4, 20, 3, 2, 16).permute(2, 0, 3, 1, 4)
            mixed = attention(query, key, value).transpose(1, 2).reshape(4, 20, 32)
            loss = (project(mixed) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    ours = losses(lambda *each: output_of(*each))
    theirs = losses(lambda *each: torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True))
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-4)
