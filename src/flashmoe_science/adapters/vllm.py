"""An attention backend of vLLM by these kernels, written against its published interface. vLLM itself has not run it.

`backend` makes the class that a plug-in of vLLM registers. What it does with tensors is in `Attention`, without vLLM.
Caches are (2, blocks, block_size, kv_heads, head_size), of the model's dtype or ``fp8`` (e4m3); decoders only.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.adapters.splits import invariant_bound, invariant_split
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.append import paged_append
from flashmoe_science.varlen.attention import attention_varlen

NAME = "CUDADENT42"
_INTERFACE = "vllm.v1.attention.backend"
_INVARIANCE = (
    ("vllm.model_executor.layers.batch_invariant", "vllm_is_batch_invariant"),
    ("vllm.envs", "VLLM_BATCH_INVARIANT"),
)
"""What says whether bits may depend on the batch: a function, or a variable; later versions have the second alone."""
_FP8 = ("fp8", "fp8_e4m3")
_SAME = ("auto", "float16", "bfloat16")
"""Caches of the model's dtype."""
_HEAD_SIZES = range(8, 257, 8)
_OLDEST = 8
"""Major compute capability: the kernels need sm_80."""


def is_batch_invariant() -> bool:
    """Whether vLLM is to give each request the same bits in any batch; False for versions that cannot say."""
    for module, name in _INVARIANCE:
        try:
            said = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        return bool(said() if callable(said) else said)
    return False


@dataclass(frozen=True)
class Metadata:
    """What all layers of a step share: fields of vLLM's ``CommonAttentionMetadata``. Lengths stay on the device."""

    num_actual_tokens: int
    """Rows of query behind these are padding."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool = True

    @classmethod
    def of(cls, common: Any) -> Metadata:
        """Of a ``CommonAttentionMetadata``. Raises InputError where its requests differ in what they see."""
        if not isinstance(common.causal, bool):
            raise InputError(
                "causal differs from request to request; this backend takes one value for all of a step"
            )
        return cls(**{name: getattr(common, name) for name in cls.__dataclass_fields__})


class Attention:
    """vLLM's ``AttentionImpl``: one layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != "decoder":
            raise InputError(f"attn_type is {attn_type!r}; this backend computes decoders' attention alone")
        if kv_cache_dtype not in (*_SAME, *_FP8):
            raise InputError(
                f"kv_cache_dtype is {kv_cache_dtype!r}; expected one of {', '.join((*_SAME, *_FP8))}"
            )
        self.kv_cache_dtype = kv_cache_dtype
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.softcap = scale, logits_soft_cap or 0.0
        # vLLM counts a query's own key in its window, which has no right side, also where a step is not causal.
        self.window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.fp8 = kv_cache_dtype in _FP8
        self.writes = kv_sharing_target_layer_name is None
        self.split_keys = invariant_split(int(is_batch_invariant()))
        self._slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        )
        self._sinks = None if sinks is None else sinks.float()

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fp8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        key, value = kv_cache.unbind(0)
        return key, value

    def _scales(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (layer._k_scale, layer._v_scale) if self.fp8 else (None, None)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """New keys and values (tokens, kv_heads, head_size), into slots; a slot of -1 is not written."""
        if self.writes and kv_cache.numel():
            tokens, (key_scale, value_scale) = slot_mapping.shape[0], self._scales(layer)
            paged_append(
                key[:tokens],
                value[:tokens],
                *self._caches(kv_cache),
                slot_mapping,
                key_scale=key_scale,
                value_scale=value_scale,
            )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Into output, (tokens, heads, head_size) or (tokens, heads * head_size); the cache has been updated before.

        A run without metadata, in which vLLM measures memory, gives zeros.
        """
        if output_scale is not None or output_block_scale is not None:
            raise InputError("output_scale is given, and this backend does not quantise its output")
        if attn_metadata is None:
            return output.zero_()
        given = attn_metadata
        tokens = given.num_actual_tokens
        key_cache, value_cache = self._caches(kv_cache)
        key_scale, value_scale = self._scales(layer)
        attention_varlen(
            query.view(-1, self.num_heads, self.head_size)[:tokens],
            key_cache,
            value_cache,
            cu_seqlens_q=given.query_start_loc,
            max_seqlen_q=invariant_bound(given.max_query_len) if self.split_keys else given.max_query_len,
            max_seqlen_k=given.max_seq_len,
            block_table=given.block_table_tensor,
            seqused_k=given.seq_lens,
            causal=given.causal,
            window=self.window,
            softcap=self.softcap,
            sinks=self._on_device("_sinks", query.device),
            alibi_slopes=self._on_device("_slopes", query.device),
            softmax_scale=self.scale,
            split_keys=self.split_keys,
            out=output.view(-1, self.num_heads, self.head_size)[:tokens],
            key_scale=key_scale,
            value_scale=value_scale,
        )
        return output

    def _on_device(self, name: str, device: torch.device) -> torch.Tensor | None:
        """Sinks or slopes, moved once."""
        tensor: torch.Tensor | None = getattr(self, name)
        if tensor is not None and tensor.device != device:
            tensor = tensor.to(device)
            setattr(self, name, tensor)
        return tensor


def backend() -> type:
    """The subclass of vLLM's ``AttentionBackend``, for ``register_backend``. Raises ImportError without vLLM."""
    interface = importlib.import_module(_INTERFACE)

    class Implementation(Attention, interface.AttentionImpl):  # type: ignore[misc, name-defined]
        pass

    class Builder(interface.AttentionMetadataBuilder):  # type: ignore[misc, name-defined]
        _cudagraph_support = interface.AttentionCGSupport.ALWAYS

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Metadata:
            return Metadata.of(common_attn_metadata)

    class Backend(interface.AttentionBackend):  # type: ignore[misc, name-defined]
        accept_output_buffer = True
        forward_includes_kv_cache_update = False

        @staticmethod
        def get_name() -> str:
            return NAME

        @staticmethod
        def get_impl_cls() -> type:
            return Implementation

        @staticmethod
        def get_builder_cls() -> type:
            return Builder

        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
        ) -> tuple[int, ...]:
            return 2, num_blocks, block_size, num_kv_heads, head_size

        @classmethod
        def supports_head_size(cls, head_size: int) -> bool:
            return head_size in _HEAD_SIZES

        @classmethod
        def supports_dtype(cls, dtype: torch.dtype) -> bool:
            return dtype in (torch.float16, torch.bfloat16)

        @classmethod
        def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
            return kv_cache_dtype in (None, *_SAME, *_FP8)

        @classmethod
        def supports_block_size(cls, block_size: int | None) -> bool:
            return True

        @classmethod
        def supports_sink(cls) -> bool:
            return True

        @classmethod
        def supports_non_causal(cls) -> bool:
            return True

        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return True

        @classmethod
        def supports_compute_capability(cls, capability: Any) -> bool:
            return capability is None or bool(capability.major >= _OLDEST)

    return Backend
