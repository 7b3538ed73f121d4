"""The backend of vLLM, with stand-ins for what vLLM passes: fields and shapes are those of its published interface."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from varlen_cases import Call, Shape, bounds, contents, paged
from varlen_reference import assert_as_exact_as_pytorch

from flashmoe_science import InputError
from flashmoe_science.adapters import vllm

BF16 = torch.bfloat16
SHAPE = Shape((3, 1, 1), (10, 1, 33), dtype=BF16)
TOKENS = 5


def common(call: Call, **changes: Any) -> SimpleNamespace:
    """A `CommonAttentionMetadata`, with more than is used."""
    return SimpleNamespace(
        num_actual_tokens=TOKENS,
        num_reqs=3,
        query_start_loc=call["cu_seqlens_q"],
        query_start_loc_cpu=call["cu_seqlens_q"].cpu(),
        seq_lens=call["seqused_k"],
        block_table_tensor=call["block_table"],
        slot_mapping=torch.full((TOKENS,), -1),
        max_query_len=3,
        max_seq_len=33,
        causal=True,
        **changes,
    )


def attention(**options: Any) -> vllm.Attention:
    return vllm.Attention(**{"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2, **options})


def joint(call: Call) -> torch.Tensor:
    return torch.stack([call["key"], call["value"]])


@pytest.mark.parametrize(
    ("chosen", "same"),
    [
        ({}, {}),
        ({"sliding_window": 4}, {"window": (3, 0)}),
        ({"logits_soft_cap": 5.0}, {"softcap": 5.0}),
        ({"sinks": torch.ones(4).to(BF16)}, {"sinks": torch.ones(4)}),
        ({"alibi_slopes": [0.5, 0.25, 0.1, 0.1]}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.1])}),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_a_step_with_padding(chosen: dict[str, Any], same: dict[str, Any], flat: bool) -> None:
    call = paged(SHAPE, 16)
    query = torch.cat([call["query"], torch.full((3, 4, 32), torch.nan, dtype=BF16)])
    output = torch.full((8, 4, 32), 7.0, dtype=BF16)
    given = (query.flatten(1), output.flatten(1)) if flat else (query, output)
    metadata = vllm.Metadata.of(common(call))
    result = attention(**chosen).forward(None, given[0], query, query, joint(call), metadata, given[1])
    assert result is given[1]
    assert (output[TOKENS:] == 7).all()
    assert_as_exact_as_pytorch(output[:TOKENS], None, call, **bounds(SHAPE), softmax_scale=0.2, **same)


@pytest.mark.parametrize("window", [None, 4])
def test_a_step_that_is_not_causal(window: int | None) -> None:
    """A window ends at the query, as vLLM's own backend has it."""
    call, output = paged(SHAPE, 16), torch.empty(TOKENS, 4, 32, dtype=BF16)
    given = common(call)
    given.causal = False
    layer = attention(sliding_window=window)
    layer.forward(None, call["query"], None, None, joint(call), vllm.Metadata.of(given), output)  # type: ignore[arg-type]
    same: dict[str, Any] = {"causal": False, "window": (-1, -1) if window is None else (3, 0)}
    assert_as_exact_as_pytorch(output, None, call, **bounds(SHAPE), softmax_scale=0.2, **same)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_new_keys_are_written_and_attended_to(dtype: str) -> None:
    call, given = paged(SHAPE, 16), contents(SHAPE)
    layer = attention(kv_cache_dtype=dtype)
    scales = SimpleNamespace(_k_scale=torch.tensor(0.01), _v_scale=torch.tensor(0.01))
    cache = torch.zeros(2, *call["key"].shape, dtype=BF16 if dtype == "auto" else torch.uint8)
    for index, (key, value) in enumerate(zip(given.keys, given.values, strict=True)):
        position = torch.arange(len(key))
        slots = call["block_table"][index].long()[position // 16] * 16 + position % 16
        padded = torch.cat([key, key]), torch.cat([value, value])
        layer.do_kv_cache_update(scales, *padded, cache, slots)
    output = torch.empty(TOKENS, 4, 32, dtype=BF16)
    layer.forward(scales, call["query"], None, None, cache, vllm.Metadata.of(common(call)), output)  # type: ignore[arg-type]
    expected = torch.empty_like(output)
    attention().forward(
        None,
        call["query"],
        None,
        None,
        joint(call),
        vllm.Metadata.of(common(call)),
        expected,  # type: ignore[arg-type]
    )
    error = (output.float() - expected.float()).square().mean().sqrt()
    assert error <= (0 if dtype == "auto" else 0.06) * expected.float().square().mean().sqrt()


FUNCTION, VARIABLE = "vllm.model_executor.layers.batch_invariant", "vllm.envs"


def say(monkeypatch: pytest.MonkeyPatch, said: dict[str, dict[str, Any]]) -> None:
    """The modules of vLLM that may say whether it is batch invariant, with what they have; others are not there."""
    for name in (FUNCTION, VARIABLE):
        module = ModuleType(name)
        vars(module).update(said.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module if name in said else None)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, False),
        ({FUNCTION: {}, VARIABLE: {}}, False),
        ({FUNCTION: {"vllm_is_batch_invariant": lambda: True}}, True),
        ({FUNCTION: {"vllm_is_batch_invariant": lambda: False}}, False),
        ({FUNCTION: {}, VARIABLE: {"VLLM_BATCH_INVARIANT": True}}, True),
        ({VARIABLE: {"VLLM_BATCH_INVARIANT": False}}, False),
    ],
)
def test_whether_vllm_is_batch_invariant_is_its_own_word(
    said: dict[str, dict[str, Any]], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, said)
    assert vllm.is_batch_invariant() is expected
    assert attention().split_keys == (512 if expected else None)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_step_whose_bits_do_not_depend_on_the_batch(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps but those of one token each have bounds with which CUDA has one kernel for their longer requests."""
    say(monkeypatch, {VARIABLE: {"VLLM_BATCH_INVARIANT": invariant}})
    asked: list[tuple[int | None, int]] = []
    compute = vllm.attention_varlen

    def recorded(*tensors: Any, **given: Any) -> Any:
        asked.append((given["split_keys"], given["max_seqlen_q"]))
        return compute(*tensors, **given)

    monkeypatch.setattr(vllm, "attention_varlen", recorded)
    call, output, layer = paged(SHAPE, 16), torch.empty(TOKENS, 4, 32, dtype=BF16), attention()
    given = common(call)
    for most in (3, 17):
        given.max_query_len = most
        layer.forward(None, call["query"], None, None, joint(call), vllm.Metadata.of(given), output)  # type: ignore[arg-type]
        assert_as_exact_as_pytorch(output, None, call, **bounds(SHAPE), softmax_scale=0.2)
    ones = Shape((1, 1), (10, 33), dtype=BF16)
    step, rows = paged(ones, 16), torch.empty(2, 4, 32, dtype=BF16)
    given = common(step)
    given.num_actual_tokens, given.max_query_len = 2, 1
    layer.forward(None, step["query"], None, None, joint(step), vllm.Metadata.of(given), rows)  # type: ignore[arg-type]
    assert asked == ([(512, 16), (512, 17), (512, 1)] if invariant else [(None, 3), (None, 17), (None, 1)])


def test_a_layer_that_shares_its_cache_does_not_write() -> None:
    cache, rows = torch.zeros(2, 1, 4, 2, 32), torch.ones(1, 2, 32)
    attention(kv_sharing_target_layer_name="other").do_kv_cache_update(
        None, rows, rows, cache, torch.zeros(1).long()
    )
    assert not cache.any()


def test_a_run_without_metadata_gives_zeros() -> None:
    output = torch.ones(2, 128)
    assert not attention().forward(None, output, output, output, output, None, output).any()


def test_what_is_not_computed_is_refused() -> None:
    for options in ({"attn_type": "encoder"}, {"kv_cache_dtype": "fp8_e5m2"}):
        with pytest.raises(InputError, match=r"expected one of auto|decoders"):
            attention(**options)
    with pytest.raises(InputError, match="output_scale"):
        attention().forward(*[None] * 7, output_scale=torch.ones(()))  # type: ignore[arg-type]


def test_the_backend_is_made_of_the_interfaces_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = ModuleType("vllm.v1.attention.backend")
    for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder"):
        setattr(interface, name, type(name, (), {}))
    interface.AttentionCGSupport = SimpleNamespace(ALWAYS=3)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    made: Any = vllm.backend()
    assert issubclass(made, interface.AttentionBackend)
    assert issubclass(made.get_impl_cls(), interface.AttentionImpl)
    assert made.get_name() == "CUDADENT42"
    assert made.get_kv_cache_shape(7, 16, 2, 32) == (2, 7, 16, 2, 32)
    metadata = made.get_builder_cls()().build(0, common(paged(SHAPE, 16)))
    assert metadata.max_seq_len == 33
    layer = made.get_impl_cls()(4, 32, 0.2, 2)
    assert layer.window == (-1, -1)
    assert layer.kv_cache_dtype == "auto"
    for name in ("auto", "float16", "bfloat16", "fp8", None):
        assert made.supports_kv_cache_dtype(name)
    assert not made.supports_kv_cache_dtype("fp8_e5m2")
    # vLLM asks before it chooses a backend, and its own answer to the first is no.
    assert made.supports_non_causal()
    assert made.supports_batch_invariance()
    for major, supported in ((7, False), (8, True), (9, True)):
        assert made.supports_compute_capability(SimpleNamespace(major=major, minor=0)) is supported


def test_a_step_whose_requests_are_causal_in_part_is_refused() -> None:
    given = common(paged(SHAPE, 16))
    given.causal = torch.tensor([True, False, True])
    with pytest.raises(InputError, match="causal differs"):
        vllm.Metadata.of(given)


def test_without_vllm_its_absence_is_said() -> None:
    if "vllm" in sys.modules:
        pytest.skip("vLLM is installed here")
    with pytest.raises(ImportError, match="vllm"):
        vllm.backend()
