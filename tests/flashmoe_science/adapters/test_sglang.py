"""The backend of SGLang, with stand-ins for its pools and batches: fields are those of its published interface."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from varlen_cases import Shape, contents, packed
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import InputError
from flashmoe_science.adapters import sglang

BF16 = torch.bfloat16
SLOTS, CONTEXT = 96, 40


class Pool:
    """A `MHATokenToKVPool`: a slot for each token."""

    def __init__(self) -> None:
        self.key, self.value = (torch.full((SLOTS, 2, 32), torch.nan, dtype=BF16) for _ in range(2))

    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scale: Any, v_scale: Any
    ) -> None:
        self.key[loc], self.value[loc] = k.view(-1, 2, 32), v.view(-1, 2, 32)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key, self.value


def layer(**changes: Any) -> SimpleNamespace:
    """A `RadixAttention`."""
    usual = {
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "qk_head_dim": 32,
        "v_head_dim": 32,
        "scaling": 0.2,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
        "layer_id": 0,
        "k_scale": None,
        "v_scale": None,
    }
    return SimpleNamespace(**usual | changes)


class Scene:
    """Three requests of 12, 1 and 30 keys, in pages that lie in any order."""

    lengths = (12, 1, 30)

    def __init__(self, page_size: int) -> None:
        self.pool = Pool()
        generator = torch.Generator().manual_seed(0)
        pages = torch.randperm(SLOTS // page_size, generator=generator)
        self.slots = torch.zeros(5, CONTEXT, dtype=torch.int32)
        self.requests = torch.tensor([3, 0, 4])
        taken = 0
        for request, length in zip(self.requests.tolist(), self.lengths, strict=True):
            count = -(-length // page_size)
            own = pages[taken : taken + count, None] * page_size + torch.arange(page_size)
            self.slots[request, :length] = own.flatten()[:length].int()
            taken += count
        self.backend = sglang.Attention(
            SimpleNamespace(
                page_size=page_size,
                req_to_token_pool=SimpleNamespace(req_to_token=self.slots),
                model_config=SimpleNamespace(context_len=CONTEXT),
            )
        )

    def batch(self, new: tuple[int, ...], decode: bool) -> SimpleNamespace:
        """A `ForwardBatch` whose last tokens of each request are new."""
        located = [
            self.slots[request, length - count : length]
            for request, length, count in zip(self.requests.tolist(), self.lengths, new, strict=True)
        ]
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode_or_idle=lambda: decode),
            seq_lens=torch.tensor(self.lengths),
            seq_lens_cpu=torch.tensor(self.lengths),
            extend_seq_lens=None if decode else torch.tensor(new),
            extend_seq_lens_cpu=None if decode else list(new),
            req_pool_indices=self.requests,
            out_cache_loc=torch.cat(located).long(),
            token_to_kv_pool=self.pool,
            spec_info=None,
        )


def parts(
    shape: Shape, new: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Old and new keys and values, flat as SGLang has them."""
    given = contents(shape)
    pairs = list(zip(given.keys, given.values, new, strict=True))
    old_keys = torch.cat([key[: len(key) - count] for key, _, count in pairs])
    old_values = torch.cat([value[: len(value) - count] for _, value, count in pairs])
    keys = torch.cat([key[len(key) - count :] for key, _, count in pairs])
    values = torch.cat([value[len(value) - count :] for _, value, count in pairs])
    return old_keys, old_values, keys.flatten(1), values.flatten(1)


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("new", [(1, 1, 1), (12, 1, 5)])
@pytest.mark.parametrize(
    ("changes", "same"),
    [({}, {}), ({"sliding_window_size": 3, "logit_cap": 5.0}, {"window": (3, 0), "softcap": 5.0})],
)
def test_a_step(page_size: int, new: tuple[int, ...], changes: dict[str, Any], same: dict[str, Any]) -> None:
    scene, shape = Scene(page_size), Shape(new, Scene.lengths, dtype=BF16)
    old_keys, old_values, keys, values = parts(shape, new)
    old = torch.cat(
        [
            scene.slots[request, : length - count]
            for request, length, count in zip(scene.requests.tolist(), scene.lengths, new, strict=True)
        ]
    ).long()
    scene.pool.key[old], scene.pool.value[old] = old_keys, old_values
    batch = scene.batch(new, decode=max(new) == 1)
    scene.backend.init_forward_metadata(batch)
    call = packed(shape)
    forward = scene.backend.forward_decode if max(new) == 1 else scene.backend.forward_extend
    result = forward(call["query"].flatten(1), keys, values, layer(**changes), batch)
    bounds = {"max_seqlen_q": max(new), "max_seqlen_k": max(scene.lengths)}
    assert_as_exact_as_pytorch(result.view(-1, 4, 32), None, call, **bounds, softmax_scale=0.2, **same)


@pytest.mark.parametrize("newer", [False, True], ids=["capture and replay", "out of the graph"])
def test_a_captured_step_reads_the_same_memory_after_lengths_changed(newer: bool) -> None:
    scene, shape = Scene(8), Shape((1, 1, 1), Scene.lengths, dtype=BF16)
    decode = SimpleNamespace(is_decode_or_idle=lambda: True)
    backend = scene.backend
    backend.init_cuda_graph_state(4, 4)
    ones = torch.ones(3, dtype=torch.int64)
    if newer:
        batch = SimpleNamespace(
            batch_size=3, req_pool_indices=ones * 0, seq_lens=ones, forward_mode=decode, spec_info=None
        )
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
    else:
        backend.init_forward_metadata_capture_cuda_graph(3, 3, ones * 0, ones, None, decode, None)
    captured = backend.metadata
    lengths = torch.tensor(scene.lengths)
    if newer:
        batch.req_pool_indices, batch.seq_lens = scene.requests, lengths
        backend.init_forward_metadata_out_graph(batch)
    else:
        backend.init_forward_metadata_replay_cuda_graph(
            3, scene.requests, lengths, 43, None, decode, None, lengths
        )
    assert captured is not None
    assert backend.metadata is not None
    assert captured.block_table.data_ptr() == backend.metadata.block_table.data_ptr()
    assert captured.seqused_k.tolist() == list(scene.lengths)
    given = contents(shape)
    slots = [scene.slots[r, :n].long() for r, n in zip(scene.requests.tolist(), scene.lengths, strict=True)]
    scene.pool.key[torch.cat(slots)], scene.pool.value[torch.cat(slots)] = (
        torch.cat(given.keys),
        torch.cat(given.values),
    )
    call = packed(shape)
    result = backend.forward_decode(
        call["query"].flatten(1),
        None,
        None,
        layer(),
        scene.batch((1, 1, 1), True),
        save_kv_cache=False,  # type: ignore[arg-type]
    )
    bounds = {"max_seqlen_q": 1, "max_seqlen_k": max(scene.lengths)}
    assert_as_exact_as_pytorch(result.view(-1, 4, 32), None, call, **bounds, softmax_scale=0.2)


class TwoPools:
    """A `SWAKVPool`: layer 1 has a window, and its keys lie in other slots of a smaller pool."""

    def __init__(self, page_size: int) -> None:
        self.pools = Pool(), Pool()
        self.layers_mapping = {0: (0, False), 1: (0, True)}
        pages = torch.randperm(SLOTS // page_size, generator=torch.Generator().manual_seed(7))
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
        self.full_to_swa_index_mapping = torch.cat([slots, torch.tensor([-1])])

    def write(self, layer_id: int, loc: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = self.full_to_swa_index_mapping[loc] if layer_id else loc
        self.pools[layer_id].set_kv_buffer(None, slots, key, value, None, None)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pools[layer_id].get_kv_buffer(0)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("page_size", [1, 8])
def test_layers_with_windows_may_have_a_pool_of_their_own(page_size: int, captured: bool) -> None:
    scene, shape = Scene(page_size), Shape((1, 1, 1), Scene.lengths, dtype=BF16)
    pool = scene.backend.token_to_kv_pool = TwoPools(page_size)
    given, batch = contents(shape), scene.batch((1, 1, 1), True)
    del batch.token_to_kv_pool  # as in newer versions of SGLang
    for request, key, value in zip(scene.requests.tolist(), given.keys, given.values, strict=True):
        for layer_id in (0, 1):
            pool.write(layer_id, scene.slots[request, : len(key)].long(), key, value)
    # The first 8 keys of the longest request have been left behind by its window.
    pool.pools[1].key[pool.full_to_swa_index_mapping[scene.slots[4, :8].long()]] = torch.nan
    pool.full_to_swa_index_mapping[scene.slots[4, :8].long()] = 0
    if captured:
        scene.backend.init_cuda_graph_state(4, 4)
        ones, decode = torch.ones(3, dtype=torch.int64), batch.forward_mode
        scene.backend.init_forward_metadata_capture_cuda_graph(3, 3, ones * 0, ones, None, decode, None)
        lengths, before = batch.seq_lens, scene.backend.metadata
        scene.backend.init_forward_metadata_replay_cuda_graph(
            3, scene.requests, lengths, 43, None, decode, None, lengths
        )
        scene.backend.metadata = before  # what the graph reads
    else:
        scene.backend.init_forward_metadata(batch)
    call = packed(shape)
    bounds = {"max_seqlen_q": 1, "max_seqlen_k": max(scene.lengths)}
    for layer_id, window in ((0, -1), (1, 3)):
        own = layer(layer_id=layer_id, sliding_window_size=window)
        query = call["query"].flatten(1)
        result = scene.backend.forward_decode(query, None, None, own, batch, save_kv_cache=False)  # type: ignore[arg-type]
        same = {"window": (window, 0), "softmax_scale": 0.2}
        assert_as_exact_as_pytorch(result.view(-1, 4, 32), None, call, **bounds, **same)
    scene.backend.token_to_kv_pool = None
    batch.token_to_kv_pool = pool
    scene.backend.init_forward_metadata(batch)
    with pytest.raises(InputError, match="keeps layers with windows apart"):
        scene.backend.forward_decode(query, None, None, own, batch, save_kv_cache=False)  # type: ignore[arg-type]


DRAFTS = 4
TREES = (
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
)
"""Whether a draft token sees another, of each request."""
PREFIXES = (8, 0, 26)


def verify_input(mode: str, topk: int = 2) -> SimpleNamespace:
    """An `EagleVerifyInput`."""
    own = torch.tensor(TREES, dtype=torch.bool)
    rows = [torch.cat([torch.ones(DRAFTS, n).bool(), tree], 1) for n, tree in zip(PREFIXES, own, strict=True)]
    mask = own.flatten() if mode == "QLEN_ONLY" else torch.cat([each.flatten() for each in rows])
    return SimpleNamespace(draft_token_num=DRAFTS, custom_mask=None if mode == "none" else mask, topk=topk)


def verify_scene(page_size: int) -> tuple[Scene, SimpleNamespace, dict[str, torch.Tensor]]:
    """A step that verifies the last tokens of each request, and the same as a packed call."""
    scene, new = Scene(page_size), (DRAFTS,) * 3
    lengths = tuple(prefix + DRAFTS for prefix in PREFIXES)
    shape = Shape(new, lengths, dtype=BF16)
    given = contents(shape)
    slots = torch.randperm(SLOTS // page_size, generator=torch.Generator().manual_seed(1)) * page_size
    taken = 0
    for row, length, key, value in zip(
        scene.requests.tolist(), lengths, given.keys, given.values, strict=True
    ):
        count = -(-length // page_size)
        own = (slots[taken : taken + count, None] + torch.arange(page_size)).flatten()[:length]
        scene.slots[row, :length] = own.int()
        scene.pool.key[own], scene.pool.value[own] = key, value
        taken += count
    batch = scene.batch((1, 1, 1), decode=False)
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor(PREFIXES)
    batch.forward_mode.is_target_verify = lambda: True
    call = packed(shape)
    words = (torch.tensor(TREES) << torch.arange(DRAFTS)).sum(-1).flatten()
    return scene, batch, {**call, "tree_mask": words}


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("mode", ["FULL_MASK", "QLEN_ONLY", "none", "chain"])
def test_draft_tokens_are_verified(page_size: int, mode: str) -> None:
    scene, batch, call = verify_scene(page_size)
    batch.spec_info = verify_input(mode, topk=1 if mode == "chain" else 2)
    if mode in ("none", "chain"):
        del call["tree_mask"]
    scene.backend.init_forward_metadata(batch)
    result = scene.backend.forward_extend(
        call["query"].flatten(1), None, None, layer(), batch, save_kv_cache=False
    )
    bounds = {"max_seqlen_q": DRAFTS, "max_seqlen_k": 30}
    assert_as_exact_as_pytorch(result.view(-1, 4, 32), None, call, **bounds, softmax_scale=0.2)


@pytest.mark.parametrize("mode", ["FULL_MASK", "QLEN_ONLY"])
def test_a_captured_step_finds_the_words_of_trees_that_come_later(mode: str) -> None:
    scene, _, call = verify_scene(8)
    backend, verify = scene.backend, SimpleNamespace(is_target_verify=lambda: True)
    backend.init_cuda_graph_state(4, 16)
    ones = torch.ones(4, dtype=torch.int64)
    backend.init_forward_metadata_capture_cuda_graph(
        4, 16, ones * 0, ones, None, verify, verify_input("none")
    )
    captured = backend.metadata
    assert captured is not None
    assert captured.tree_mask.tolist() == [-1] * 16
    # The last request only fills up the batch, and has no mask.
    requests = torch.cat([scene.requests, torch.tensor([1])])
    lengths = torch.tensor([*PREFIXES, 1])
    backend.init_forward_metadata_replay_cuda_graph(
        4, requests, lengths, 35, None, verify, verify_input(mode), None
    )
    assert captured.tree_mask[:12].tolist() == call["tree_mask"].tolist()
    assert captured.seqused_k.tolist() == [12, 4, 30, 5]
    assert captured.cu_seqlens_q.tolist() == [0, 4, 8, 12, 16]
    assert captured.max_seqlen_q == DRAFTS


@pytest.mark.parametrize("mode", ["FULL_MASK", "QLEN_ONLY"])
def test_a_mask_in_memory_for_more_is_read_as_sglang_says_or_refused(mode: str) -> None:
    scene, batch, call = verify_scene(8)
    batch.spec_info = verify_input(mode)
    batch.spec_info.custom_mask = torch.cat([batch.spec_info.custom_mask, torch.ones(7, dtype=torch.bool)])
    with pytest.raises(InputError, match=r"expected 184, a FULL_MASK, or 48, a QLEN_ONLY, of 3 requests"):
        scene.backend.init_forward_metadata(batch)
    scene.backend.verify_mask = SimpleNamespace(mode=SimpleNamespace(name=mode))  # type: ignore[attr-defined]
    scene.backend.init_forward_metadata(batch)
    assert scene.backend.metadata is not None
    assert scene.backend.metadata.tree_mask is not None
    assert scene.backend.metadata.tree_mask.tolist() == call["tree_mask"].tolist()


def test_a_mask_of_the_longest_context_is_a_full_one() -> None:
    assert sglang.kind_of(3 * DRAFTS * (CONTEXT + DRAFTS), list(PREFIXES), DRAFTS, CONTEXT) == "FULL_MASK"


def test_a_request_of_one_key_is_no_row_that_fills_up() -> None:
    """A FULL_MASK of the first alone has 32 entries, as a QLEN_ONLY of both."""
    assert sglang.kind_of(32, [4, 1], 4, CONTEXT) == "QLEN_ONLY"
    assert sglang.kind_of(32, [4, 1], 4, CONTEXT, filled_up=True) == "FULL_MASK"


def test_a_tree_in_a_layer_with_a_window_is_refused() -> None:
    scene, batch, call = verify_scene(8)
    batch.spec_info = verify_input("FULL_MASK")
    scene.backend.init_forward_metadata(batch)
    query = call["query"].flatten(1)
    with pytest.raises(InputError, match="tree_mask"):
        scene.backend.forward_extend(
            query, None, None, layer(sliding_window_size=3), batch, save_kv_cache=False
        )


def test_a_capture_does_not_read_the_memory_of_masks() -> None:
    scene, _, _ = verify_scene(8)
    verify, spec = SimpleNamespace(is_target_verify=lambda: True), verify_input("none")
    spec.custom_mask = torch.zeros(1000, dtype=torch.bool)
    scene.backend.init_cuda_graph_state(4, 16)
    ones = torch.ones(4, dtype=torch.int64)
    scene.backend.init_forward_metadata_capture_cuda_graph(4, 16, ones * 0, ones, None, verify, spec)
    assert scene.backend.metadata is not None
    assert scene.backend.metadata.tree_mask is not None
    assert scene.backend.metadata.tree_mask.tolist() == [-1] * 16


def test_what_is_not_computed_is_refused() -> None:
    scene = Scene(1)
    batch = scene.batch((1, 1, 1), True)
    query = torch.zeros(3, 128, dtype=BF16)
    with pytest.raises(InputError, match="call init_forward_metadata first"):
        scene.backend.forward_decode(query, query, query, layer(), batch)
    with pytest.raises(InputError, match="cross attention"):
        scene.backend.forward_decode(query, query, query, layer(is_cross_attention=True), batch)
    for kind in ("encoder_only", "decoder_bidirectional"):
        other = layer(attn_type=SimpleNamespace(value=kind))
        with pytest.raises(InputError, match=f"one of {kind}"):
            scene.backend.forward_decode(query, query, query, other, batch)
    batch.spec_info, batch.forward_mode.is_target_verify = object(), lambda: False
    with pytest.raises(InputError, match="verifies draft tokens and computes none"):
        scene.backend.init_forward_metadata(batch)
    lengths = torch.tensor([3])
    with pytest.raises(InputError, match="expected booleans: FULL_MASK or QLEN_ONLY"):
        sglang.tree_words(torch.zeros(1, dtype=torch.uint8), lengths, 4, "QLEN_ONLY")
    with pytest.raises(InputError, match="trees have 65 draft tokens; this backend verifies up to 64"):
        sglang.tree_words(torch.zeros(65 * 65, dtype=torch.bool), lengths, 65, "QLEN_ONLY")


def test_the_backend_is_made_of_the_interfaces_class(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = ModuleType("sglang.srt.layers.attention.base_attn_backend")
    interface.AttentionBackend = type("AttentionBackend", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    assert issubclass(sglang.backend(), interface.AttentionBackend)
