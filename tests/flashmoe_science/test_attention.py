from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from attention_reference import assert_as_exact_as_torch, exact_attention
from torch._subclasses import FakeTensorMode

import flashmoe_science
from flashmoe_science import DeviceError, InputError, flash_attention
from flashmoe_science.cuda import attention as cuda
from flashmoe_science.cuda.attention.forward import calls


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 20, 32, generator=generator).to(dtype)
    key, value = (torch.randn(2, 2, 30, 32, generator=generator).to(dtype) for _ in range(2))
    return query, key, value


def test_output_alone_or_with_the_log_sum_exp() -> None:
    query, key, value = tensors()
    alone = flash_attention(query, key, value, causal=True)
    assert isinstance(alone, torch.Tensor)
    assert_as_exact_as_torch(alone, query, key, value, True)
    out, lse = flash_attention(query, key, value, causal=True, return_lse=True)
    assert torch.equal(out, alone)
    torch.testing.assert_close(lse.double(), exact_attention(query, key, value, True)[1], atol=1e-5, rtol=0)


def test_scale() -> None:
    query, key, value = tensors()
    explicit = flash_attention(query, key, value, softmax_scale=1 / math.sqrt(32))
    torch.testing.assert_close(explicit, flash_attention(query, key, value), atol=1e-6, rtol=1e-6)
    assert_as_exact_as_torch(
        flash_attention(query, key, value, softmax_scale=0.7), query, key, value, False, 0.7
    )


@pytest.mark.parametrize("scale", [1e39, -2.4e38, 1e-39, -1e-300])
def test_a_scale_that_float32_does_not_hold_is_refused(scale: float) -> None:
    with pytest.raises(InputError, match=r"softmax_scale is .*, which float32 does not hold"):
        flash_attention(*tensors(), causal=True, softmax_scale=scale)


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-38, -1e-38])
def test_scores_that_are_next_to_zero(scale: float) -> None:
    query, key, value = tensors()
    out = flash_attention(query, key, value, causal=True, softmax_scale=scale)
    assert_as_exact_as_torch(out, query, key, value, True, scale)


def test_public_names() -> None:
    assert all(hasattr(flashmoe_science, name) for name in flashmoe_science.__all__)


QUERY, KEY, VALUE = tensors()
BAD = [
    ((QUERY[0], KEY, VALUE), {}, "query has 3 dimensions"),
    ((QUERY, KEY[0], VALUE), {}, "key has 3 dimensions"),
    ((QUERY, KEY, VALUE.half()), {}, "value is torch.float16 but query is torch.float32"),
    ((QUERY.double(), KEY.double(), VALUE.double()), {}, "query has dtype torch.float64"),
    ((QUERY.int(), KEY, VALUE), {}, "query has dtype torch.int32"),
    ((QUERY, KEY.to("meta"), VALUE), {}, "key is on meta but query is on cpu"),
    ((QUERY, KEY, VALUE[:, :, :-1]), {}, "differ in shape"),
    ((QUERY[:1], KEY, VALUE), {}, "batch 1 but key has 2"),
    ((QUERY, KEY[..., :16], VALUE[..., :16]), {}, "head_dim 32 but key has 16"),
    ((QUERY[:, :3], KEY, VALUE), {}, "3 query heads cannot share 2"),
    ((QUERY, KEY[:, :0], VALUE[:, :0]), {}, "4 query heads cannot share 0"),
    ((QUERY[..., :4], KEY[..., :4], VALUE[..., :4]), {}, "head_dim is 4"),
    (
        (QUERY[..., :12], KEY[..., :12], VALUE[..., :12]),
        {},
        "head_dim is 12; expected a multiple of 8 up to 256: pad ",
    ),
    (
        (QUERY.repeat(1, 1, 1, 9)[..., :264],) * 3,
        {},
        "head_dim is 264; expected a multiple of 8 up to 256: call PyTorch's scaled_dot_product_attention",
    ),
    ((QUERY.mT.contiguous().mT, KEY, VALUE), {}, "last dimension of query is not contiguous"),
    ((QUERY, KEY, VALUE.mT.contiguous().mT), {}, "last dimension of value is not contiguous"),
    ((QUERY, KEY, VALUE), {"softmax_scale": math.nan}, "softmax_scale is nan"),
    ((QUERY, KEY, VALUE), {"softmax_scale": "1"}, "softmax_scale is '1'"),
    ((QUERY, KEY, VALUE), {"softmax_scale": np.float32("inf")}, "softmax_scale is "),
    ((QUERY, KEY, VALUE), {"softmax_scale": 10**400}, "softmax_scale is 1000"),
    ((QUERY, KEY, VALUE), {"softmax_scale": 1j}, "softmax_scale is 1j"),
    ((QUERY, KEY, VALUE), {"causal": []}, "causal is []"),
    ((QUERY, KEY, VALUE), {"causal": "no"}, "causal is 'no'"),
    ((QUERY, KEY, VALUE), {"causal": None}, "causal is None"),
    ((QUERY, KEY, VALUE), {"causal": 1}, "causal is 1"),
    ((QUERY, KEY, [1.0]), {}, "value is a list"),
    ((None, KEY, VALUE), {}, "query is a NoneType"),
    ((QUERY, KEY, VALUE.to_sparse()), {}, "value has layout torch.sparse_coo"),
    ((QUERY.clone().requires_grad_(), KEY, [1.0]), {}, "value is a list"),
    ((QUERY, KEY, VALUE.clone().requires_grad_()), {"causal": 1}, "causal is 1"),
    ((QUERY, KEY[:, :, :-1], VALUE.clone().requires_grad_()), {}, "differ in shape"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), BAD, ids=[case[2] for case in BAD])
def test_bad_input_says_what_was_wrong(arguments, options, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError) as raised:
        flash_attention(*arguments, **options)
    text = str(raised.value)
    assert message in text
    assert "\n" not in text
    assert ";" in text  # what was wrong; what to do


def test_bad_input_is_refused_also_after_a_good_call_of_the_same_shape() -> None:
    query, key, value = tensors()
    flash_attention(query, key, value)
    with pytest.raises(InputError, match="key is on meta"):
        flash_attention(query, key.detach().to("meta"), value)


@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), np.int64(1), Fraction(1, 4)])
def test_a_scale_may_be_any_real_number(scale: object) -> None:
    query, key, value = tensors()
    expected = flash_attention(query, key, value, softmax_scale=float(scale))  # type: ignore[arg-type]
    assert torch.equal(flash_attention(query, key, value, softmax_scale=scale), expected)  # type: ignore[arg-type]


def test_causal_may_be_a_numpy_bool_and_nothing_that_only_equals_one() -> None:
    query, key, value = tensors()
    for causal in (True, False):
        expected = flash_attention(query, key, value, causal=causal)
        assert torch.equal(flash_attention(query, key, value, causal=np.bool_(causal)), expected)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="expected True or False"):
            flash_attention(query, key, value, causal=int(causal))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scale", "like_the_last"),
    [(0.125, True), (float("0.125"), True), (None, False), (0.25, False), (np.float64(0.125), False)],
)
def test_a_cuda_call_is_like_the_last_if_its_scale_has_the_same_value(
    monkeypatch: pytest.MonkeyPatch, scale: Any, like_the_last: bool
) -> None:
    """Whatever object holds it: a user who writes ``1 / math.sqrt(head_dim)`` makes one in every call."""
    result = torch.zeros(1)
    last = (3, False, 0.125, False, None, lambda *tensors: True, lambda *tensors: (result, None))
    with FakeTensorMode():
        fake = [torch.empty(1, 2, 16, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
    monkeypatch.setattr(calls, "recent", last)
    assert (flash_attention(*fake, softmax_scale=scale) is result) is like_the_last


def test_fake_cuda_tensors_are_refused_before_anything_is_launched() -> None:
    with FakeTensorMode():
        fake = [torch.empty(1, 2, 16, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
    with pytest.raises(InputError, match="query has no memory"):
        cuda.forward(*fake)


def test_a_backends_forward_refuses_what_autograd_would_record() -> None:
    with FakeTensorMode():
        fake = [torch.empty(1, 2, 16, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
    fake[1].requires_grad_()
    with pytest.raises(InputError, match=r"not recorded; call flashmoe_science\.flash_attention"):
        cuda.forward(*fake)


def test_fake_tensors_without_elements_need_no_memory() -> None:
    with FakeTensorMode():
        query, key = torch.empty(1, 2, 0, 32), torch.empty(1, 2, 5, 32)
        out = flash_attention(query, key, key)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (1, 2, 0, 32)


def test_tensors_that_require_gradients_are_fine_where_autograd_is_off() -> None:
    query, key, value = tensors()
    query.requires_grad_()
    with torch.no_grad():
        out = flash_attention(query, key, value)
    assert isinstance(out, torch.Tensor)
    assert not out.requires_grad


def test_a_device_without_a_kernel_is_named() -> None:
    query, key, value = (tensor.to("meta") for tensor in tensors())
    with pytest.raises(DeviceError, match="no kernel for meta"):
        flash_attention(query, key, value)
