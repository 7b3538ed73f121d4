"""An attention backend of SGLang by these kernels, written against its published interface. SGLang has not run it.

`backend` makes the class that SGLang's registry takes. What it does with tensors is in `Attention`, without SGLang.
Decoders only, steps that verify draft tokens among them; a draft model's own steps and cross attention are refused.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.errors import InputError
from flashmoe_science.varlen.attention import attention_varlen

_INTERFACE = "sglang.srt.layers.attention.base_attn_backend"
_MOST_DRAFTS = 64
"""Bits of a word of `attention_varlen`'s tree masks."""
_FILL = 1
"""The length of rows that fill up a captured batch."""


@dataclass(frozen=True)
class Metadata:
    """What all layers of a step share. Lengths stay on the device."""

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    tree_mask: torch.Tensor | None = None
    """Where draft tokens are verified that are no chain: see `attention_varlen`."""
    window_table: torch.Tensor | None = None
    """Where keys of layers with windows lie in a pool of their own (``SWAKVPool``): the pages there."""


class Attention:
    """SGLang's ``AttentionBackend``."""

    def __init__(self, model_runner: Any) -> None:
        self.page_size: int = model_runner.page_size
        self.req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.max_context_len: int = model_runner.model_config.context_len
        self.token_to_kv_pool: Any = getattr(model_runner, "token_to_kv_pool", None)
        self.metadata: Metadata | None = None
        self._of_graphs: Metadata | None = None
        self._starts: dict[int, torch.Tensor] = {}
        """Of captured steps that verify as many tokens a request."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Once a step, before its layers."""
        verified = _verified(forward_batch.forward_mode, forward_batch.spec_info)
        lengths = forward_batch.seq_lens.to(torch.int32)
        # The host's copy of the lengths bounds the table; without it the longest context does.
        on_host = forward_batch.seq_lens_cpu
        longest = self.max_context_len if on_host is None else int(on_host.max()) if len(on_host) else 0
        tree = None
        if verified is not None:
            # Lengths are of what was accepted, without the drafts.
            most = verified.draft_token_num
            starts = self._one_each(len(lengths), lengths.device) * most
            if _has_branches(verified) and verified.custom_mask is not None:
                tree = self._tree(verified.custom_mask, lengths, most, on_host, filled_up=False)
            lengths, longest = lengths + most, min(longest + most, self.req_to_token.shape[1])
        elif forward_batch.forward_mode.is_decode_or_idle():
            starts, most = self._one_each(len(lengths), lengths.device), 1
        else:
            new = forward_batch.extend_seq_lens
            starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).to(torch.int32)
            most = max(forward_batch.extend_seq_lens_cpu, default=0)
        table = self._table(forward_batch.req_pool_indices, longest)
        self.metadata = Metadata(starts, lengths, table, most, longest, tree, self._window_table(table))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, kv_indices_buf: Any = None) -> None:
        """The memory that captured steps read, for the largest batch."""
        device, longest = self.req_to_token.device, self.req_to_token.shape[1]
        columns = -(-longest // self.page_size)
        self._starts.clear()
        table = torch.zeros(max_bs, columns, dtype=torch.int32, device=device)
        self._of_graphs = Metadata(
            self._one_each(max_bs, device),
            torch.ones(max_bs, dtype=torch.int32, device=device),
            table,
            1,
            longest,
            torch.zeros(max_num_tokens, dtype=torch.int64, device=device),
            self._window_table(table),
        )

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Captured with these lengths, and with the longest context as the bound."""
        self._update_graphs(bs, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info, None, True)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: torch.Tensor | None,
    ) -> None:
        """New lengths and tables, in the same memory."""
        self._update_graphs(
            bs, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info, seq_lens_cpu, False
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The same before a capture and before each replay, as newer versions of SGLang ask for it."""
        self._update_graphs(
            forward_batch.batch_size,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            getattr(forward_batch, "encoder_lens", None),
            forward_batch.forward_mode,
            forward_batch.spec_info,
            getattr(forward_batch, "seq_lens_cpu", None),
            in_capture,
        )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing is left to be done in the graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Of the rows that fill up a captured batch."""
        return _FILL

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> torch.Tensor:
        """(tokens, heads * v_head_dim) of one token of each sequence."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(tokens, heads * v_head_dim); new keys and values go to the pool first."""
        kind = "cross attention" if layer.is_cross_attention else layer.attn_type.value
        # The others of its kinds see keys behind a query, which would be hidden from them.
        if kind != "decoder":
            raise InputError(f"the layer is one of {kind}; this backend computes decoders' attention alone")
        # Newer versions of SGLang have the pool at the runner alone.
        pool, given = getattr(forward_batch, "token_to_kv_pool", self.token_to_kv_pool), self.metadata
        if given is None:
            raise InputError("no step was begun; call init_forward_metadata first")
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        key, value = (
            buffer.view(-1, self.page_size, *buffer.shape[1:])
            for buffer in pool.get_kv_buffer(layer.layer_id)
        )
        table = given.window_table if _in_pool_of_windows(pool, layer.layer_id) else given.block_table
        if table is None:
            raise InputError(
                "the batch's pool keeps layers with windows apart, and the runner's did not; expected one pool"
            )
        fp8 = key.dtype is torch.float8_e4m3fn
        # SGLang counts the keys before a query's own in its window; -1 and None are no window.
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        result = attention_varlen(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            key,
            value,
            cu_seqlens_q=given.cu_seqlens_q,
            max_seqlen_q=given.max_seqlen_q,
            max_seqlen_k=given.max_seqlen_k,
            block_table=table,
            seqused_k=given.seqused_k,
            window=(window, -1),
            softcap=layer.logit_cap or 0.0,
            sinks=None if sinks is None else sinks.float(),
            softmax_scale=layer.scaling,
            tree_mask=given.tree_mask,
            key_scale=layer.k_scale if fp8 else None,
            value_scale=layer.v_scale if fp8 else None,
        )
        assert isinstance(result, torch.Tensor)
        return result.flatten(1)

    def _table(self, requests: torch.Tensor, longest: int) -> torch.Tensor:
        """Pages of each sequence: the pool has a slot for each token, those of a page one after another."""
        slots = self.req_to_token[requests, :longest]
        return (slots[:, :: self.page_size] // self.page_size).to(torch.int32).contiguous()

    def _window_table(self, table: torch.Tensor) -> torch.Tensor | None:
        """The same pages in the pool of layers with windows; None where there is one pool for all.

        What windows have left behind is no longer there. No row sees it, so any page does, the first one.
        """
        slots = getattr(self.token_to_kv_pool, "full_to_swa_index_mapping", None)
        if slots is None:
            return None
        pages: torch.Tensor = slots[table.long() * self.page_size].clamp(min=0) // self.page_size
        return pages.to(torch.int32)

    def _update_graphs(
        self,
        bs: int,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        on_host: torch.Tensor | None,
        in_capture: bool,
    ) -> None:
        verified = _verified(forward_mode, spec_info)
        if encoder_lens is not None or (verified is None and not forward_mode.is_decode_or_idle()):
            raise InputError(
                "a graph of something else than decode steps is to be captured; expected decode steps, or steps "
                "that verify draft tokens"
            )
        of_graphs = self._of_graphs
        if of_graphs is None or of_graphs.tree_mask is None:
            raise InputError("there is no memory for graphs; call init_cuda_graph_state first")
        most = 1 if verified is None else verified.draft_token_num
        of_graphs.seqused_k[:bs].copy_(lengths[:bs] if verified is None else lengths[:bs] + most)
        pages = self._table(requests[:bs], of_graphs.max_seqlen_k)
        of_graphs.block_table[:bs, : pages.shape[1]].copy_(pages)
        of_windows = self._window_table(pages)
        if of_graphs.window_table is not None and of_windows is not None:
            of_graphs.window_table[:bs, : pages.shape[1]].copy_(of_windows)
        starts, words = of_graphs.cu_seqlens_q, None
        if verified is not None:
            if most not in self._starts:
                self._starts[most] = of_graphs.cu_seqlens_q * most
            starts = self._starts[most]
            if _has_branches(verified):
                # A captured step always has words: a mask that comes later finds them there. What a capture is given
                # is memory for any batch, with no mask in it yet.
                words = of_graphs.tree_mask[: bs * most]
                mask = None if in_capture else verified.custom_mask
                if mask is None:
                    words.fill_(-1)
                else:
                    words.copy_(self._tree(mask, lengths[:bs], most, on_host, filled_up=True))
        self.metadata = Metadata(
            starts[: bs + 1],
            of_graphs.seqused_k[:bs],
            of_graphs.block_table[:bs],
            most,
            of_graphs.max_seqlen_k,
            words,
            None if of_graphs.window_table is None else of_graphs.window_table[:bs],
        )

    def _tree(
        self,
        mask: torch.Tensor,
        lengths: torch.Tensor,
        drafts: int,
        on_host: torch.Tensor | None,
        *,
        filled_up: bool,
    ) -> torch.Tensor:
        """By the kind that SGLang says, or else by the mask's size: then the lengths are asked for."""
        said = getattr(self, "verify_mask", None)
        kind = said.mode.name if said is not None else None
        if kind is None:
            before = (lengths if on_host is None else on_host[: len(lengths)]).tolist()
            kind = kind_of(mask.numel(), before, drafts, self.max_context_len, filled_up=filled_up)
        return tree_words(mask, lengths, drafts, kind)

    @staticmethod
    def _one_each(batch: int, device: torch.device) -> torch.Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=device)


def kind_of(entries: int, lengths: list[int], drafts: int, longest: int, *, filled_up: bool = False) -> str:
    """Which mask of SGLang's has so many entries: ``FULL_MASK`` or ``QLEN_ONLY``. Raises InputError where none has.

    With ``filled_up`` the batch may end in rows that only fill it up, each of length 1, of which the mask has nothing.
    So a size may be that of both; ``FULL_MASK`` is what SGLang writes on GPUs unless a backend asks for the other.

    Args:
        lengths: keys of each request before its drafts.
        longest: context, for which SGLang makes room where it does not know the lengths.
    """
    batch = len(lengths)
    fewest = batch
    while filled_up and fewest and lengths[fewest - 1] == _FILL:
        fewest -= 1
    counts = range(fewest, batch + 1)
    full = {drafts * (sum(lengths[:count]) + count * drafts) for count in counts}
    if entries in full or entries in {count * drafts * (longest + drafts) for count in counts}:
        return "FULL_MASK"
    if entries in {count * drafts * drafts for count in counts}:
        return "QLEN_ONLY"
    raise InputError(
        f"custom_mask has {entries} entries; expected {drafts * (sum(lengths) + batch * drafts)}, a FULL_MASK, or "
        f"{batch * drafts * drafts}, a QLEN_ONLY, of {batch} requests with {drafts} draft tokens"
    )


def tree_words(custom_mask: torch.Tensor, lengths: torch.Tensor, drafts: int, kind: str) -> torch.Tensor:
    """SGLang's mask of a step that verifies trees, as `attention_varlen` takes it: (batch * drafts,) int64.

    Args:
        custom_mask: booleans, flat. More may follow, as in memory for a larger batch; rows that fill up a captured
            batch may be missing.
        lengths: (batch,) keys of each request before its drafts.
        drafts: tokens that each request verifies.
        kind: SGLang's name of what the mask has of each request in turn: ``FULL_MASK``, (drafts, length + drafts), or
            ``QLEN_ONLY``, (drafts, drafts). The size alone does not tell where more may follow.
    """
    if custom_mask.dtype is not torch.bool or kind not in ("FULL_MASK", "QLEN_ONLY"):
        raise InputError(
            f"custom_mask is {custom_mask.dtype}, a {kind}; expected booleans: FULL_MASK or QLEN_ONLY"
        )
    if drafts > _MOST_DRAFTS:
        raise InputError(f"trees have {drafts} draft tokens; this backend verifies up to {_MOST_DRAFTS}")
    node = torch.arange(drafts, dtype=torch.int64, device=lengths.device)
    before = lengths.long() if kind == "FULL_MASK" else torch.zeros_like(lengths, dtype=torch.int64)
    width = before + drafts
    first = (drafts * width).cumsum(0) - drafts * width + before
    at = first[:, None, None] + width[:, None, None] * node[:, None] + node
    own = custom_mask[at.clamp(max=custom_mask.numel() - 1)]
    return (own.long() << node).sum(-1).flatten()


def _verified(forward_mode: Any, spec_info: Any) -> Any:
    """What a step verifies; None where it has no draft tokens. Raises InputError for a draft model's own steps."""
    if spec_info is None:
        return None
    if not forward_mode.is_target_verify():
        raise InputError(
            "the batch is a draft model's; this backend verifies draft tokens and computes none: choose another for "
            "drafts"
        )
    return spec_info


def _in_pool_of_windows(pool: Any, layer_id: int) -> bool:
    """Whether a layer's keys lie there, and not in the pool that slots of requests are of."""
    if getattr(pool, "full_to_swa_index_mapping", None) is None:
        return False
    _, with_window = pool.layers_mapping[layer_id]
    return bool(with_window)


def _has_branches(spec_info: Any) -> bool:
    """A chain of drafts is causal, without a mask."""
    return getattr(spec_info, "topk", 2) != 1


def backend() -> type:
    """The subclass of SGLang's ``AttentionBackend``. Raises ImportError without SGLang."""
    interface = importlib.import_module(_INTERFACE)

    class Backend(Attention, interface.AttentionBackend):  # type: ignore[misc, name-defined]
        pass

    return Backend
