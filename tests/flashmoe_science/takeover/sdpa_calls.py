"""Calls of PyTorch's scaled_dot_product_attention as people write them, and as nobody should: made from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class SdpaCall:
    """One call, ready to be made any number of times with the same result."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)
    around: str = "nothing"

    def __call__(self) -> torch.Tensor:
        # Dropout's. Without a GPU torch.manual_seed keeps a traceback for each kind of device.
        torch.default_generator.manual_seed(7)
        return AROUND[self.around](
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **self.options), self
        )

    def gradients(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Of the tensors that ask for one, by the output's product with fixed numbers."""
        wanted = [tensor for tensor in (self.query, self.key, self.value) if tensor.requires_grad]
        if not wanted or not output.requires_grad:
            return []
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)
        return list(torch.autograd.grad(output, wanted, weights))

    def exact(self) -> SdpaCall:
        """The same in float64 by plain operations; for calls without dropout of dense tensors."""
        tensors = [
            tensor.detach().double().requires_grad_(tensor.requires_grad)
            for tensor in (self.query, self.key, self.value)
        ]
        options = dict(self.options)
        return SdpaCall(*tensors, options=options, around="math")


Made = Callable[..., torch.Tensor]


def _plain(call: Made, made: SdpaCall) -> torch.Tensor:
    return call(made.query, made.key, made.value)


def _math(call: Made, made: SdpaCall) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _plain(call, made)


def _inference(call: Made, made: SdpaCall) -> torch.Tensor:
    with torch.inference_mode():
        return _plain(call, made)


def _no_grad(call: Made, made: SdpaCall) -> torch.Tensor:
    with torch.no_grad():
        return _plain(call, made)


def _autocast(call: Made, made: SdpaCall) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _plain(call, made)


def _vmap(call: Made, made: SdpaCall) -> torch.Tensor:
    return torch.vmap(call)(
        *(tensor.expand(2, *tensor.shape) for tensor in (made.query, made.key, made.value))
    )


AROUND: dict[str, Callable[[Made, SdpaCall], torch.Tensor]] = {
    "nothing": _plain,
    "math": _math,
    "inference": _inference,
    "no_grad": _no_grad,
    "autocast": _autocast,
    "vmap": _vmap,
}


def make_call(seed: int) -> SdpaCall:
    """Two of three are such as the kernels could take; the others have something about them."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, heads = pick.choice((1, 1, 2, 3)), pick.choice((1, 2, 4, 6))
    kv_heads = pick.choice([each for each in (1, 2, 3, heads) if heads % each == 0])
    grouped = kv_heads != heads or pick.random() < 0.2
    seqlen_q = pick.choice((1, 2, 5, 16, 33))
    seqlen_k = seqlen_q if pick.random() < 0.5 else pick.choice((1, 3, 17, 40))
    head_dim = pick.choice((8, 16, 16, 24, 32, 64, 64, 80, 128))
    dtype = pick.choice(DTYPES)

    def tensor(count: int, length: int) -> torch.Tensor:
        form = pick.choice(("contiguous", "transposed", "part", "expanded"))
        if form == "transposed":
            made = torch.randn(batch, length, count, head_dim, generator=generator).transpose(1, 2)
        elif form == "part":
            made = torch.randn(batch, count, length + 2, head_dim, generator=generator)[:, :, 1:-1]
        elif form == "expanded":
            made = torch.randn(1, count, length, head_dim, generator=generator).expand(batch, -1, -1, -1)
        else:
            made = torch.randn(batch, count, length, head_dim, generator=generator)
        return made.to(dtype)

    query, key = tensor(heads, seqlen_q), tensor(kv_heads, seqlen_k)
    options: dict[str, Any] = {}
    if grouped:
        options["enable_gqa"] = True
    if pick.random() < 0.4:
        options["is_causal"] = True
    if pick.random() < 0.3:
        options["scale"] = pick.choice((0.1, 1.0, 0.37, 1.5, 3, 0.0, -0.5))
    made = SdpaCall(query, key, tensor(kv_heads, seqlen_k), options)
    if pick.random() < 0.35:
        pick.choice(ODD)(made, pick, generator)
    if pick.random() < 0.4:
        for each in (made.query, made.key, made.value):
            if each.is_leaf and each.is_floating_point() and not each.is_meta and pick.random() < 0.8:
                each.requires_grad_()
    if made.around == "nothing" and pick.random() < 0.25:
        made.around = pick.choice(("math", "inference", "no_grad", "autocast", "vmap"))
    return made


Odd = Callable[[SdpaCall, random.Random, torch.Generator], None]


def _lengths(made: SdpaCall) -> tuple[int, int, int]:
    return made.query.shape[0], made.query.shape[2], made.key.shape[2]


def padding_mask(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    batch, seqlen_q, seqlen_k = _lengths(made)
    mask = torch.ones(batch, 1, 1, seqlen_k, dtype=torch.bool)
    for row in mask:
        hidden = pick.randrange(seqlen_k)
        row[..., hidden:] = hidden == 0
        if pick.random() < 0.5:
            row.copy_(row.flip(-1))
    made.options["attn_mask"] = mask if pick.random() < 0.5 else mask.expand(-1, -1, seqlen_q, -1)
    if pick.random() < 0.9:
        made.options.pop("is_causal", None)


def same_padding(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    mask = torch.ones(made.key.shape[2], dtype=torch.bool)
    mask[pick.randrange(1, made.key.shape[2] + 1) :] = False
    made.options["attn_mask"] = mask if pick.random() < 0.2 else mask.expand(made.query.shape[2], -1)
    made.options.pop("is_causal", None)


def any_mask(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    batch, seqlen_q, seqlen_k = _lengths(made)
    made.options.pop("is_causal", None)
    shape = pick.choice(((seqlen_q, seqlen_k), (batch, 1, seqlen_q, seqlen_k), (batch, 1, 1, seqlen_k)))
    mask = torch.rand(shape, generator=generator) < pick.choice((0.0, 0.6, 1.0))
    added = torch.randn(shape, generator=generator).to(made.query.dtype)
    made.options["attn_mask"] = mask if pick.random() < 0.6 else added


def bias_object(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    _, seqlen_q, seqlen_k = _lengths(made)
    made.options["attn_mask"] = pick.choice((causal_lower_right, causal_upper_left))(seqlen_q, seqlen_k)
    made.options.pop("is_causal", None)


def dropout(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    made.options["dropout_p"] = pick.choice((0.3, 1.0))


def mask_and_causal(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    made.options |= {"attn_mask": torch.ones(_lengths(made)[1:], dtype=torch.bool), "is_causal": True}


def other_dimensions(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    change = pick.choice((lambda t: t[0], lambda t: t[0, 0], lambda t: t[None]))
    made.query, made.key, made.value = change(made.query), change(made.key), change(made.value)


def one_odd_tensor(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    name = pick.choice(("query", "key", "value"))
    change = pick.choice(
        (
            lambda t: t.double(),
            lambda t: t.half(),
            lambda t: t[..., : t.shape[-1] // 2],
            lambda t: t[..., :7],
            lambda t: t[:, :1],
            lambda t: t[:1],
            lambda t: t[:, :, :1],
            lambda t: t[:, :, :0],
            lambda t: t.to("meta"),
            lambda t: t.mT.contiguous().mT,
            lambda t: torch._neg_view(-t),
            lambda t: torch.nn.Parameter(t.clone()),
            lambda t: t.to(torch.int64),
            lambda t: t[0],
        )
    )
    setattr(made, name, change(getattr(made, name)))


def all_odd(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    change = pick.choice(
        (
            lambda t: t.double(),
            lambda t: t.to("meta"),
            lambda t: t[..., :7],
            lambda t: t[..., :12],
            lambda t: t[:0],
            lambda t: t[:, :, :0],
            lambda t: t.to(torch.complex64),
            lambda t: torch.cat([t] * 5, -1),
            lambda t: torch.nested.as_nested_tensor([row.contiguous() for row in t]),
        )
    )
    made.query, made.key, made.value = change(made.query), change(made.key), change(made.value)


def odd_options(made: SdpaCall, pick: random.Random, generator: torch.Generator) -> None:
    made.options |= pick.choice(
        (
            {"scale": float("inf")},
            {"scale": float("nan")},
            {"scale": 1e-44},
            {"scale": True},
            {"enable_gqa": False},
            {"dropout_p": -0.5},
            {"attn_mask": 3},
            {"is_causal": 1},
            {"nothing_of_that_name": 1},
        )
    )


ODD: tuple[Odd, ...] = (
    *(padding_mask, padding_mask, same_padding, any_mask, bias_object, dropout, mask_and_causal),
    *(other_dimensions, one_odd_tensor, one_odd_tensor, all_odd, odd_options),
)
