"""PyTorch's scaled_dot_product_attention with and without the takeover: the same, whatever it is called with."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sdpa_calls import SdpaCall, make_call, padding_mask
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashmoe_science
from flashmoe_science.errors import CaptureError
from flashmoe_science.takeover import attention
from flashmoe_science.takeover.counts import Entry

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    flashmoe_science.reset_report()
    yield
    assert F.scaled_dot_product_attention is ORIGINAL


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    """Compiled once; a machine without a compiler takes nothing, which other tests are about."""
    tensor = torch.zeros(1, 1, 1, 8)
    try:
        flashmoe_science.flash_attention(tensor, tensor, tensor)
    except flashmoe_science.DeviceError as error:
        pytest.skip(str(error))


def result(call: SdpaCall) -> tuple[Any, ...]:
    """What the call gives, with its gradients; or what it raises, and with which words."""
    try:
        output = call()
        return output, *call.gradients(output)
    except Exception as error:  # noqa: BLE001 any that PyTorch raises is to be raised again
        # A TypeError's words say whether an argument was given by position.
        return type(error), "" if isinstance(error, TypeError) else str(error)


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one == other
    if one.is_nested:
        return all(same(*pair) for pair in zip(one.unbind(), other.unbind(), strict=True))
    if one.is_meta:
        return one.shape == other.shape
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def assert_as_exact(taken: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, inner: float) -> None:
    """No further from the exact numbers than twice PyTorch's own error, and a few roundings.

    Args:
        inner: how much larger than the result the numbers may be that it is the difference of.
    """
    assert taken.shape == plain.shape
    assert taken.dtype == plain.dtype
    roundings = 4 * torch.finfo(taken.dtype).eps * (1 + exact.abs().max().item()) * inner
    allowed = 2 * (plain - exact).abs().max().item() + roundings
    assert (taken - exact).abs().max().item() <= allowed


@pytest.mark.parametrize("group", range(20))
@pytest.mark.filterwarnings("ignore")
def test_a_thousand_calls_agree(group: int) -> None:
    taken = 0
    for seed in range(50 * group, 50 * group + 50):
        call = make_call(seed)
        plain = result(call)
        flashmoe_science.reset_report()
        with flashmoe_science.sdpa():
            ours = result(call)
        report = flashmoe_science.report()
        assert len(ours) == len(plain), (seed, plain, ours)
        if not report.taken:
            assert all(same(*pair) for pair in zip(ours, plain, strict=True)), (seed, str(report))
            continue
        taken += 1
        triples = zip(ours, plain, result(call.exact())[: len(plain)], strict=True)
        factors = {1: call.key, 2: call.query}
        for index, (one, other, exact) in enumerate(triples):
            # A gradient is a sum over products of head_dim numbers, scaled as the scores are.
            root = call.query.shape[-1] ** 0.5
            inner = 1 + call.options.get("scale", 1 / root) * root if index else 1
            if index in factors and not exact.any():
                # Of one visible key it is nothing, and says nothing of the numbers whose difference it is, which are
                # equal in PyTorch. They are multiplied with keys (or queries), whose size stands for them.
                inner *= 1 + factors[index].abs().max().item()
            assert_as_exact(one.detach(), other.detach(), exact.detach(), inner)
    assert taken >= 15


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def call_plainly() -> torch.Tensor:
    query = sample(1, 2, 5, 16)
    return F.scaled_dot_product_attention(query, query, query)


def taken() -> int:
    return flashmoe_science.report().taken


def test_contexts_nest_and_the_switch_is_off_by_default() -> None:
    call_plainly()
    assert taken() == 0
    with flashmoe_science.sdpa():
        with flashmoe_science.sdpa():
            call_plainly()
        call_plainly()
        assert taken() == 2
    call_plainly()
    assert taken() == 2


def test_the_process_wide_switch() -> None:
    flashmoe_science.enable_sdpa()
    flashmoe_science.enable_sdpa()
    try:
        call_plainly()
        with flashmoe_science.sdpa():
            call_plainly()
        call_plainly()
    finally:
        flashmoe_science.disable_sdpa()
    call_plainly()
    assert taken() == 3


def test_an_exception_ends_the_takeover() -> None:
    with pytest.raises(KeyError), flashmoe_science.sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is ORIGINAL


def test_contexts_of_threads_end_in_any_order() -> None:
    outer, inner = flashmoe_science.sdpa(), flashmoe_science.sdpa()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    call_plainly()
    assert taken() == 1
    inner.__exit__(None, None, None)
    call_plainly()
    assert taken() == 1


def test_many_threads_at_once() -> None:
    """Each with contexts of its own: none is lost, no count either, and at the end all is as before."""
    wrong: list[float] = []
    expected = call_plainly()

    def work() -> None:
        for _ in range(20):
            with flashmoe_science.sdpa():
                wrong.append((call_plainly() - expected).abs().max().item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken() == 80
    assert max(wrong) < 1e-5


def test_another_replacement_stays() -> None:
    """One that was there before is what declined calls go to; one that came later is not undone."""
    seen: list[str] = []

    def earlier(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append("earlier")
        return ORIGINAL(*arguments, **options)

    query = sample(1, 2, 5, 16)
    F.scaled_dot_product_attention = earlier
    try:
        with flashmoe_science.sdpa():
            F.scaled_dot_product_attention(query, query, query, dropout_p=0.1)
            ours = F.scaled_dot_product_attention

            def later(*arguments: Any, **options: Any) -> torch.Tensor:
                seen.append("later")
                return ours(*arguments, **options)

            F.scaled_dot_product_attention = later
            call_plainly()
            assert taken() == 1
        assert F.scaled_dot_product_attention is later
        call_plainly()
        assert taken() == 1
        assert seen == ["earlier", "later", "later", "earlier"]
    finally:
        F.scaled_dot_product_attention = ORIGINAL


def test_torchs_own_modules_are_reached() -> None:
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    inputs = sample(2, 5, 32)
    expected, _ = layer(inputs, inputs, inputs, need_weights=False)
    with flashmoe_science.sdpa():
        output, _ = layer(inputs, inputs, inputs, need_weights=False)
    assert taken() == 1
    torch.testing.assert_close(output, expected)


def test_a_choice_of_backends_is_respected() -> None:
    with flashmoe_science.sdpa():
        with sdpa_kernel(SDPBackend.MATH):
            call_plainly()
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            call_plainly()
    assert taken() == 1
    assert flashmoe_science.report().reasons(Entry.SDPA) == {
        "torch.nn.attention.sdpa_kernel asks for others": 1
    }


def test_a_padding_mask_is_taken_and_one_with_gaps_is_not() -> None:
    query, key = sample(2, 4, 3, 16), sample(2, 2, 9, 16)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., 5:] = False
    mask[1, ..., :4] = False
    expected = F.scaled_dot_product_attention(query, key, key, mask, enable_gqa=True)
    gaps = mask.clone()
    gaps[0, ..., 2] = False
    with flashmoe_science.sdpa():
        output = F.scaled_dot_product_attention(query, key, key, mask, enable_gqa=True)
        assert taken() == 1
        F.scaled_dot_product_attention(query, key, key, gaps, enable_gqa=True)
    assert taken() == 1
    assert "a mask with gaps" in flashmoe_science.report().reasons()
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("within_rows", [False, True], ids=["heads before rows", "heads within rows"])
def test_the_output_over_padding_lies_as_pytorchs_does(within_rows: bool) -> None:
    """Also where each sequence has a length of its own: a model may view it as (batch, seqlen, hidden)."""
    query = sample(2, 3, 4, 16).transpose(1, 2) if within_rows else sample(2, 4, 3, 16)
    key = sample(2, 4, 9, 16)
    mask = torch.arange(9) < torch.tensor([5, 8])[:, None, None, None]
    expected = F.scaled_dot_product_attention(query, key, key, mask)
    with flashmoe_science.sdpa():
        output = F.scaled_dot_product_attention(query, key, key, mask)
    assert taken() == 1
    assert output.stride() == expected.stride() == query.stride()
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("shape", [(2, 1, 7, 9), (2, 5, 1, 9), (7, 9), (3, 1, 1, 9), (2, 1, 1, 8)], ids=str)
def test_a_padding_mask_that_does_not_broadcast_is_refused_as_before(shape: tuple[int, ...]) -> None:
    """Also one that is expanded: by its strides it has one row for all, but more than there are."""
    query, key = sample(2, 4, 3, 16), sample(2, 4, 9, 16)
    mask = torch.ones(shape[-1], dtype=torch.bool).expand(shape)
    with flashmoe_science.sdpa(), pytest.raises(RuntimeError, match=r"expand|size|shape"):
        F.scaled_dot_product_attention(query, key, key, mask)
    assert (taken(), flashmoe_science.report().declined) == (0, 1)


def test_what_is_hidden_is_not_read() -> None:
    """Numbers that are none, behind the padding, reach neither the output nor a gradient."""
    call = make_call(0)
    for seed in range(200):
        call = make_call(seed)
        if call.query.dim() == 4 and call.key.shape[2] > 1 and call.query.shape[0] > 1 and not call.options:
            break
    query, key, value = (tensor.detach().clone() for tensor in (call.query, call.key, call.value))
    padded = SdpaCall(query, key, value)
    padding_mask(padded, random.Random(3), torch.Generator().manual_seed(0))
    hidden = ~padded.options["attn_mask"][:, 0, 0]
    for row, missing in enumerate(hidden):
        key[row, :, missing] = torch.nan
        value[row, :, missing] = torch.nan
    query.requires_grad_()
    with flashmoe_science.sdpa():
        output = padded()
    (gradient,) = padded.gradients(output)
    assert hidden.any()
    assert taken() == 1
    assert output.isfinite().all()
    assert gradient.isfinite().all()


def test_a_scripted_and_a_traced_function_keep_pytorchs_operator() -> None:
    def function(query: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, query, query)

    query = sample(1, 2, 5, 16)
    with flashmoe_science.sdpa(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(function, (query,))
        scripted = torch.jit.script(function)
        assert torch.equal(traced(query), ORIGINAL(query, query, query))
        assert torch.equal(scripted(query), ORIGINAL(query, query, query))


def test_a_machine_without_a_compiler_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has failed, it is not tried again."""
    tries = []

    def fails(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        tries.append(1)
        raise flashmoe_science.DeviceError("no C++ compiler was found; install g++")

    monkeypatch.setattr(attention, "flash_attention", fails)
    monkeypatch.setattr(attention, "_failures", {})
    query = sample(1, 2, 5, 16)
    with flashmoe_science.sdpa():
        outputs = [F.scaled_dot_product_attention(query, query, query) for _ in range(3)]
    assert all(torch.equal(output, ORIGINAL(query, query, query)) for output in outputs)
    assert len(tries) == 1
    assert flashmoe_science.report().reasons() == {"DeviceError: no C++ compiler was found": 3}


def test_a_call_while_a_graph_is_captured_says_nothing_of_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be loaded then; afterwards it can."""
    loaded = attention.flash_attention
    errors = [CaptureError("the kernel is not loaded yet; call the function once before")]

    def fails_once(*tensors: torch.Tensor, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return loaded(*tensors, **options)

    monkeypatch.setattr(attention, "flash_attention", fails_once)
    monkeypatch.setattr(attention, "_failures", {})
    query = sample(1, 2, 5, 16)
    with flashmoe_science.sdpa():
        for _ in range(3):
            F.scaled_dot_product_attention(query, query, query)
    assert [(each.calls, each.declined) for each in flashmoe_science.report().counts] == [
        (2, None),
        (1, "CaptureError: the kernel is not loaded yet"),
    ]


def test_compiled_code_follows_the_takeover() -> None:
    """Without a graph break, and compiled again where the takeover begins or ends."""
    compiled = torch.compile(call_with, backend="aot_eager", fullgraph=True)
    query = sample(1, 2, 8, 16).requires_grad_()
    expected = call_with(query)
    (gradient,) = torch.autograd.grad(expected.sum(), query)
    for inside in (False, True, False):
        if inside:
            with flashmoe_science.sdpa():
                output = compiled(query)
        else:
            output = compiled(query)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad(output.sum(), query)[0], gradient)
    (count,) = flashmoe_science.report().counts
    assert (count.calls, count.traced, count.declined) == (1, True, None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_what_was_taken(reentrant: bool) -> None:
    query = sample(1, 2, 8, 16).requires_grad_()
    expected = torch.autograd.grad(call_with(query).square().sum(), query)[0]
    with flashmoe_science.sdpa():
        output = checkpoint(call_with, query, use_reentrant=reentrant)
        output.square().sum().backward()
    # The other kind ends the recomputation in the midst of the call, where it has what it needs.
    assert (taken(), flashmoe_science.report().declined) == (2 if reentrant else 1, 0)
    torch.testing.assert_close(query.grad, expected)


def test_the_default_device_and_a_counter_of_operations_are_no_reason_to_decline() -> None:
    with torch.device("cpu"), FlopCounterMode(display=False), flashmoe_science.sdpa():
        call_plainly()
    assert taken() == 1


def test_a_mode_that_watches_functions_sees_pytorchs() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    query = sample(1, 2, 5, 16)
    with flashmoe_science.sdpa(), torch.autocast("cpu", torch.bfloat16), Watch():
        F.scaled_dot_product_attention(query, query, query)
    assert seen == [ORIGINAL]
    assert flashmoe_science.report().reasons() == {"a torch function mode": 1}


def test_autocast_casts_what_pytorchs_function_would_have_cast() -> None:
    query = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float16, torch.float8_e4m3fn):
        tensor = query.to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            expected = call_with(tensor)
            with flashmoe_science.sdpa():
                output = call_with(tensor)
        assert output.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
    assert taken() == 3


def call_with(query: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, query, query, is_causal=True)


def test_the_report_says_what_and_why() -> None:
    assert str(flashmoe_science.report()) == "no call was taken or declined"
    query = sample(1, 2, 5, 16)
    with flashmoe_science.sdpa():
        call_plainly()
        call_plainly()
        F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    report = flashmoe_science.report()
    assert (report.taken, report.declined) == (2, 1)
    assert str(report).splitlines() == [
        "2 scaled_dot_product_attention taken",
        "1 scaled_dot_product_attention declined: dropout",
    ]
    assert report.reasons(Entry.HUGGING_FACE_ATTENTION) == {}


@pytest.mark.parametrize(
    "options", [{"enable_gqa": 1}, {"is_causal": 1}, {"scale": "1"}, {"dropout_p": None}]
)
def test_options_of_a_type_that_pytorch_refuses_are_refused_by_it(options: dict[str, Any]) -> None:
    query = sample(1, 2, 5, 16)
    with pytest.raises(TypeError):
        F.scaled_dot_product_attention(query, query, query, **options)
    with flashmoe_science.sdpa(), pytest.raises(TypeError, match="must be"):
        F.scaled_dot_product_attention(query, query, query, **options)
    assert (taken(), flashmoe_science.report().declined) == (0, 1)
