"""FlashAttention's functions, against float64 and by their published semantics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from varlen_cases import NAN, Shape, packed, paged
from varlen_reference import exact_varlen

from flashmoe_science import InputError
from flashmoe_science.adapters.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)


def close(result: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, seqlen_q, heads, dim) and (batch, heads, seqlen_q)."""
    parts = [
        exact_varlen(
            q[index],
            k[index],
            v[index],
            cu_seqlens_q=torch.tensor([0, q.shape[1]]),
            cu_seqlens_k=torch.tensor([0, k.shape[1]]),
            **options,
        )
        for index in range(q.shape[0])
    ]
    return torch.stack([out for out, _ in parts]), torch.stack([lse.T for _, lse in parts])


@pytest.mark.parametrize(
    "options", [{}, {"window": (5, 2)}, {"softcap": 3.0}, {"sinks": torch.tensor([1.0, 0.0, 2.0, -1.0])}]
)
@pytest.mark.parametrize("causal", [False, True])
def test_dense_batches(causal: bool, options: dict[str, Any]) -> None:
    q, k, v = random(2, 7, 4, 32), random(2, 12, 2, 32, seed=1), random(2, 12, 2, 32, seed=2)
    exact, exact_lse = exact_dense(q, k, v, causal=causal, **options)
    theirs = {("window_size" if name == "window" else name): option for name, option in options.items()}
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, **theirs)
    close(out, exact)
    close(lse, exact_lse)
    alone = flash_attn_func(q, k, v, None, causal, num_splits=4, deterministic=True, **theirs)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_batches_with_chunks_and_values_of_another_dimension(causal: bool) -> None:
    q, k, v = random(2, 7, 4, 48), random(2, 12, 2, 48, seed=1), random(2, 12, 2, 32, seed=2)
    for options in ({}, {"chunk": 4, "sinks": random(4, seed=3)}):
        exact, exact_lse = exact_dense(q, k, v, causal=causal, **options)
        theirs = {("attention_chunk" if name == "chunk" else name): each for name, each in options.items()}
        out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, **theirs)  # type: ignore[arg-type]
        close(out, exact)
        close(lse, exact_lse)
    with pytest.raises(InputError, match="requires a gradient"):
        flash_attn_func(q.requires_grad_(), k, v)


def test_dense_batches_have_gradients() -> None:
    q, k, v = (random(1, 5, 2, 16, seed=seed).requires_grad_() for seed in range(3))
    out = flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


SHAPE = Shape((3, 1, 5), (10, 4, 5))


def test_packed_sequences() -> None:
    call = packed(SHAPE)
    exact, exact_lse = exact_varlen(**call, causal=False, window=(4, 1))
    q, k, v, starts_q, starts_k = call.values()
    out, lse = flash_attn_varlen_func(
        q, k, v, starts_q, starts_k, 5, 10, window_size=(4, 1), return_attn_probs=True
    )
    close(out, exact)
    close(lse, exact_lse.T)


def test_pages_with_sinks_into_a_tensor() -> None:
    call = paged(SHAPE, 16)
    sinks = torch.tensor([0.5, 1.0, -1.0, 2.0], dtype=torch.bfloat16)
    exact, _ = exact_varlen(**call, sinks=sinks.float())
    out = torch.empty_like(call["query"])
    result = flash_attn_varlen_func(
        *(call[name] for name in ("query", "key", "value", "cu_seqlens_q")),
        None,
        5,
        10,
        block_table=call["block_table"],
        seqused_k=call["seqused_k"],
        causal=True,
        s_aux=sinks,
        out=out,
        fa_version=3,
    )
    assert result is out
    close(out, exact)


@pytest.mark.parametrize("lengths", [12, torch.tensor([3, 12], dtype=torch.int32), None])
def test_a_dense_cache(lengths: Any) -> None:
    q, k_cache, v_cache = random(2, 2, 4, 32), random(2, 15, 2, 32, seed=1), random(2, 15, 2, 32, seed=2)
    used = [15, 15] if lengths is None else [12, 12] if isinstance(lengths, int) else lengths.tolist()
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    for index, length in enumerate(used):
        one = slice(index, index + 1)
        exact, exact_lse = exact_dense(q[one], k_cache[one, :length], v_cache[one, :length], causal=True)
        close(out[one], exact)
        close(lse[one], exact_lse)
    swapped = flash_attn_with_kvcache(
        q.flip(0),
        k_cache,
        v_cache,
        cache_seqlens=lengths.flip(0) if isinstance(lengths, torch.Tensor) else lengths,
        cache_batch_idx=torch.tensor([1, 0]),
        causal=True,
    )
    assert torch.equal(swapped.flip(0), out)


@pytest.mark.parametrize("ragged", [False, True])
def test_new_keys_are_written_and_attended_to(ragged: bool) -> None:
    before = torch.tensor([9, 3, 0], dtype=torch.int32)
    new = [1, 4, 2] if ragged else [2, 2, 2]
    shape = Shape(tuple(new), tuple(int(length) + more for length, more in zip(before, new, strict=True)))
    call, whole = paged(shape, 4), packed(shape)
    exact, exact_lse = exact_varlen(**whole)
    cache = {name: call[name].clone() for name in ("key", "value")}
    starts = whole["cu_seqlens_k"]
    rows = torch.cat(
        [torch.arange(end - more, end) for end, more in zip(starts[1:].tolist(), new, strict=True)]
    )
    for index, (length, more) in enumerate(zip(before.tolist(), new, strict=True)):
        for position in range(length, length + more):
            page = call["block_table"][index, position // 4]
            cache["key"][page, position % 4] = cache["value"][page, position % 4] = NAN
    k, v, q = whole["key"][rows], whole["value"][rows], call["query"]
    options: dict[str, Any] = {"cache_seqlens": before, "causal": True, "page_table": call["block_table"]}
    if ragged:
        options |= {
            "cu_seqlens_q": call["cu_seqlens_q"],
            "cu_seqlens_k_new": call["cu_seqlens_q"],
            "max_seqlen_q": 4,
        }
    else:
        q, k, v = (tensor.view(3, 2, *tensor.shape[1:]) for tensor in (q, k, v))
    out, lse = flash_attn_with_kvcache(q, *cache.values(), k, v, **options, return_softmax_lse=True)
    close(out.reshape(exact.shape), exact)
    close(lse.T if ragged else lse.transpose(1, 2).reshape(exact_lse.shape), exact_lse)
    for name in cache:
        assert torch.equal(cache[name].nan_to_num(7.0), call[name].nan_to_num(7.0))


def test_what_is_not_computed_is_refused() -> None:
    q = random(1, 4, 2, 16)
    for options, message in (
        ({"dropout_p": 0.1}, "does not compute dropout_p"),
        ({"qv": q}, "does not compute qv"),
        ({"attention_chunk": -8}, "chunk is -8; expected a number of keys"),
    ):
        with pytest.raises(InputError, match=message):
            flash_attn_func(q, q, q, **options)
    with pytest.raises(InputError, match="does not compute cache_leftpad"):
        flash_attn_with_kvcache(q, q, q, cache_leftpad=torch.zeros(1))
    angles = random(8, 4)
    with pytest.raises(InputError, match=r"shapes \(8, 4\) and None; expected both"):
        flash_attn_with_kvcache(q, q, q, q, q, rotary_cos=angles)
    with pytest.raises(InputError, match="rotary_cos is given without k and v"):
        flash_attn_with_kvcache(q, q, q, rotary_cos=angles, rotary_sin=angles)
    with pytest.raises(InputError, match=r"window_size is 5; expected \(left, right\)"):
        flash_attn_func(q, q, q, window_size=5)  # type: ignore[arg-type]
    small = q.bfloat16(), *(q[0].to(torch.float8_e4m3fn),) * 2
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(InputError, match="k_descale has a row for each sequence"):
        flash_attn_varlen_func(small[0][0], *small[1:], starts, starts, 2, 2, k_descale=random(2, 2))
    with pytest.raises(InputError, match="k is given without v"):
        flash_attn_with_kvcache(q, q, q, q)
    flash_attn_func(q, q, q, dropout_p=0.0, qv=None, attention_chunk=0)


def test_rows_behind_the_new_keys_of_all_sequences_are_padding() -> None:
    """As a captured graph has them, whose tensors are larger than what a step needs."""
    q, k, v = random(4, 4, 32), random(4, 2, 32, seed=1), random(4, 2, 32, seed=2)
    caches = random(2, 2, 15, 2, 32, seed=3)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    options: dict[str, Any] = {
        "cache_seqlens": torch.tensor([3, 14], dtype=torch.int32),
        "cu_seqlens_q": starts,
        "cu_seqlens_k_new": starts,
        "max_seqlen_q": 1,
        "causal": True,
    }
    exact_caches, padded_caches = caches.clone(), caches.clone()
    exact = flash_attn_with_kvcache(q[:2], *exact_caches, k[:2], v[:2], **options)
    padded = flash_attn_with_kvcache(q, *padded_caches, k, v, **options)
    assert isinstance(padded, torch.Tensor)
    assert torch.equal(padded_caches, exact_caches)
    assert torch.equal(padded[:2], exact)  # type: ignore[arg-type]
    assert (padded[2:] == 0).all()


def test_new_keys_that_a_cache_has_no_room_for_are_refused() -> None:
    q, k, caches = random(2, 1, 4, 32), random(2, 1, 2, 32, seed=1), random(2, 2, 15, 2, 32, seed=3)
    before = caches.clone()
    for length in (15, -1):
        with pytest.raises(InputError, match=f"position {length}; expected positions from 0 to 14"):
            flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=length)
    assert torch.equal(caches, before)


def test_arguments_of_a_cache_that_exclude_each_other() -> None:
    q, caches = random(2, 1, 4, 32), random(2, 2, 15, 2, 32, seed=3)
    with pytest.raises(InputError, match="v is given without k"):
        flash_attn_with_kvcache(q, *caches, None, caches[1, :, :1])
    with pytest.raises(InputError, match="cache_batch_idx is given with a page table"):
        flash_attn_with_kvcache(
            q,
            *caches,
            page_table=torch.tensor([[0], [1]], dtype=torch.int32),
            cache_batch_idx=torch.tensor([1, 0]),
        )


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])])
def test_log_sum_exps_are_natural_and_have_no_sink(sinks: torch.Tensor | None) -> None:
    """(heads, tokens) of packed sequences, (batch, heads, seqlen_q) of a cache; minus infinity without keys."""
    shape = Shape((3, 2), (7, 1))
    call = packed(shape)
    lengths = call["cu_seqlens_q"], call["cu_seqlens_k"], 3, 7
    tensors = call["query"], call["key"], call["value"]
    given = {"causal": True, "return_softmax_lse": True, "s_aux": sinks}
    _, lse = flash_attn_varlen_func(*tensors, *lengths, **given)  # type: ignore[arg-type, misc]
    scores = torch.einsum("qhd,khd->hqk", call["query"][:3], call["key"][:7].repeat_interleave(2, 1))
    hidden = torch.arange(7) > torch.arange(3)[:, None] + 4
    expected = (scores * 32**-0.5).masked_fill(hidden, -torch.inf).double().exp().sum(-1).log()
    assert lse.shape == (4, 5)
    close(lse[:, :3], expected)
    assert (lse[:, 3] == -torch.inf).all()
    cache = paged(Shape((1, 1), (7, 0)), 8)
    _, of_cache = flash_attn_with_kvcache(
        cache["query"][:, None],
        cache["key"],
        cache["value"],
        cache_seqlens=cache["seqused_k"],
        page_table=cache["block_table"].clamp(min=0),
        **given,  # type: ignore[arg-type]
    )
    assert of_cache.shape == (2, 4, 1)
    assert of_cache[0].isfinite().all()
    assert (of_cache[1] == -torch.inf).all()


def turned(
    rows: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """(tokens, heads, dim) in float64, by complex numbers; angles (positions, rotary_dim / 2)."""
    pairs = angles.shape[1]
    rows = rows.double()
    first = rows[..., : 2 * pairs : 2] if interleaved else rows[..., :pairs]
    second = rows[..., 1 : 2 * pairs : 2] if interleaved else rows[..., pairs : 2 * pairs]
    result = torch.complex(first, second) * torch.exp(1j * angles[positions].double())[:, None]
    parts = result.real, result.imag
    both = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([both, rows[..., 2 * pairs :]], -1)


@pytest.mark.parametrize("packed_rows", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "given", [{"causal": True}, {}, {"window_size": (6, 2)}], ids=["causal", "full", "local"]
)
def test_rotary_embeddings_of_queries_and_new_keys(
    packed_rows: bool, interleaved: bool, given: dict[str, Any]
) -> None:
    before, new = torch.tensor([9, 3, 0], dtype=torch.int32), 2
    q, k, v = random(3, new, 4, 32), random(3, new, 2, 32, seed=1), random(3, new, 2, 32, seed=2)
    caches, angles = random(2, 3, 15, 2, 32, seed=3), random(20, 12, seed=4)
    begins = before if packed_rows else torch.tensor([4, 0, 7], dtype=torch.int32)
    options: dict[str, Any] = dict(given)
    if packed_rows:
        starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": 2}
    else:
        options["rotary_seqlens"] = begins
    rows = (each.flatten(0, 1) if packed_rows else each for each in (q, k, v))
    q_given, k_given, v_given = rows
    written = caches.clone()
    out = flash_attn_with_kvcache(
        q_given,
        *written,
        k_given,
        v_given,
        cache_seqlens=before,
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        rotary_interleaved=interleaved,
        **options,
    )
    assert isinstance(out, torch.Tensor)
    out = out.view(q.shape)
    window = given.get("window_size", (-1, -1))
    for index, length in enumerate(before.tolist()):
        position = begins[index] + torch.arange(new)
        keys = turned(k[index], position, angles, interleaved)
        close(written[0, index, length : length + new], keys)
        queries = turned(q[index], position if given else position[:1].repeat(new), angles, interleaved)
        exact, _ = exact_dense(
            queries[None],
            torch.cat([caches[0, index, :length].double(), keys])[None],
            torch.cat([caches[1, index, :length], v[index]])[None].double(),
            causal=given.get("causal", False),
            window=window,
        )
        close(out[index], exact[0])


def test_what_vllm_passes_for_a_cache_of_16_bits_is_taken() -> None:
    """No window is None, or a list; scales of the layer come with every cache, expanded to (batch, kv_heads). Where
    keys lie in pages, cu_seqlens_k is left out.
    """
    call = paged(SHAPE, 16)
    scale = torch.tensor(0.5).expand(3, 2)
    exact, _ = exact_varlen(**call)
    given: dict[str, Any] = {
        "q": call["query"],
        "k": call["key"],
        "v": call["value"],
        "cu_seqlens_q": call["cu_seqlens_q"],
        "max_seqlen_q": 5,
        "seqused_k": call["seqused_k"],
        "max_seqlen_k": 10,
        "block_table": call["block_table"],
        "causal": True,
        "q_descale": None,
        "k_descale": scale,
        "v_descale": scale,
        "scheduler_metadata": None,
        "fa_version": 3,
        "num_splits": 0,
        "cp_world_size": 1,
    }
    for options in ({"window_size": None}, {"window_size": [-1, -1]}, {"cu_seqlens_k": None}):
        result = flash_attn_varlen_func(**given | options)
        assert isinstance(result, torch.Tensor)
        close(result, exact)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(InputError, match=f"{name} is missing; expected the most"):
            flash_attn_varlen_func(**given | {name: None})


def test_caches_of_fp8_with_one_scale_for_all_sequences() -> None:
    call = {
        name: each.bfloat16() if each.is_floating_point() else each for name, each in paged(SHAPE, 4).items()
    }
    scales = torch.tensor([0.01, 0.02])
    codes = {
        name: (call[name].float() / scales[:, None]).to(torch.float8_e4m3fn) for name in ("key", "value")
    }
    wide = {name: codes[name].double() * scales[:, None].double() for name in codes}
    exact, _ = exact_varlen(**call | wide | {"query": call["query"].double()})
    for descale in (scales, scales.expand(3, 2)):
        out = flash_attn_with_kvcache(
            call["query"],
            codes["key"],
            codes["value"],
            cache_seqlens=call["seqused_k"],
            page_table=call["block_table"],
            cu_seqlens_q=call["cu_seqlens_q"],
            max_seqlen_q=5,
            causal=True,
            k_descale=descale,
            v_descale=descale,
        )
        assert isinstance(out, torch.Tensor)
        torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


def test_one_split_is_the_same_bits_in_any_batch() -> None:
    shape = Shape((1,) * 40, (5000,) * 40, heads=1, kv_heads=1, head_dim=8)
    call = packed(shape)

    def first(sequences: int, **options: Any) -> torch.Tensor:
        starts = call["cu_seqlens_q"][: sequences + 1], call["cu_seqlens_k"][: sequences + 1]
        result = flash_attn_varlen_func(
            call["query"][:sequences], call["key"], call["value"], *starts, 1, 5000, **options
        )
        assert isinstance(result, torch.Tensor)
        return result[0]

    assert torch.equal(first(40, num_splits=1), first(1, num_splits=1))
    assert not torch.equal(first(40), first(1))


@pytest.mark.parametrize("options", [{}, {"attention_chunk": 7000}])
def test_one_split_is_the_same_bits_in_any_dense_batch(options: dict[str, Any]) -> None:
    q, k, v = random(8, 1, 8, 16), random(8, 8192, 8, 16, seed=1), random(8, 8192, 8, 16, seed=2)

    def first(sequences: int, **hints: Any) -> torch.Tensor:
        result = flash_attn_func(q[:sequences], k[:sequences], v[:sequences], **options, **hints)
        assert isinstance(result, torch.Tensor)
        return result[0]

    assert torch.equal(first(8, num_splits=1), first(1, num_splits=1))
    with pytest.raises(InputError, match="requires a gradient"):
        flash_attn_func(q.requires_grad_(), k, v, num_splits=1)
