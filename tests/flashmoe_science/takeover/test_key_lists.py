"""Masks as lists of keys: exact whatever a mask says, without a look at it, in eager code and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import flashmoe_science
from flashmoe_science.operators.listed_keys import LISTED_KEYS, attend, rows_of
from flashmoe_science.takeover import attention, key_lists
from flashmoe_science.takeover.key_lists import lists_of, over_lists, why_not_listed
from flashmoe_science.takeover.masks import key_ranges

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    tensor = torch.zeros(1, 1, 1, 8)
    try:
        flashmoe_science.flash_attention(tensor, tensor, tensor)
    except flashmoe_science.DeviceError as error:
        pytest.skip(str(error))


def tensors(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, layout: str, device: str = "cpu"
) -> list[torch.Tensor]:
    """Query, key and value; keys as in a cache (by head), as projected (by token), or part of more."""
    generator = torch.Generator().manual_seed(seqlen_k)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query = torch.randn(batch, seqlen_q, heads, 16, generator=generator).to(device, dtype).transpose(1, 2)
    made = [query]
    for _ in range(2):
        if layout == "by token":
            rows = torch.randn(batch, seqlen_k, kv_heads, 16, generator=generator).transpose(1, 2)
        elif layout == "by head":
            rows = torch.randn(batch, kv_heads, seqlen_k, 16, generator=generator)
        else:
            rows = torch.randn(batch, kv_heads, seqlen_k + 3, 16, generator=generator)[:, :, :seqlen_k]
        made.append(rows.to(device, dtype))
    return made


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """In float64; zero where a row sees nothing."""
    group = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(group, 1) for each in (key, value))
    scores = query.double() @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ value


@given(
    batch=st.integers(1, 3),
    group=st.sampled_from([1, 4]),
    kv_heads=st.integers(1, 2),
    seqlen_q=st.integers(1, 4),
    seqlen_k=st.integers(1, 40),
    layout=st.sampled_from(["by token", "by head", "longer"]),
    shared=st.tuples(st.booleans(), st.booleans()),
    dimensions=st.sampled_from([2, 3, 4]),
    density=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
)
def test_any_mask_is_computed_exactly(
    batch: int,
    group: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    layout: str,
    shared: tuple[bool, bool],
    dimensions: int,
    density: float,
) -> None:
    """Gaps, rows of their own, masks that all share; what is hidden is not read, even if it is NaN."""
    query, key, value = tensors(batch, group * kv_heads, kv_heads, seqlen_q, seqlen_k, layout)
    generator = torch.Generator().manual_seed(batch)
    sizes = (1 if shared[0] else batch, 1, 1 if shared[1] else seqlen_q, seqlen_k)
    mask = torch.rand(sizes, generator=generator) < density
    if dimensions < 4:
        mask = mask[0] if dimensions == 3 else mask[0, 0]
    if why_not_listed(query, key, value, mask) is not None:
        assert rows_of(key) is None
        return
    hidden = ~torch.as_tensor(mask).broadcast_to(batch, 1, seqlen_q, seqlen_k).any(2)
    right = exact(query, key, value, mask)
    spoilt = [each.masked_fill(hidden[..., None], torch.nan) for each in (key, value)]
    for kept, each in zip(spoilt, (key, value), strict=True):
        each.copy_(kept)
    output = over_lists(query, key, value, mask, None)
    torch.testing.assert_close(output.double(), right, rtol=0, atol=1e-5)
    assert output.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("layout", ["by token", "by head", "longer"])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_one_graph_without_a_look_at_the_mask(layout: str, seqlen_q: int, device: str) -> None:
    query, key, value = tensors(2, 4, 2, seqlen_q, 24, layout, device)
    torch._dynamo.reset()
    flashmoe_science.reset_report()

    @torch.compile(fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    tolerance = 1e-5 if device == "cpu" else 2e-2
    with flashmoe_science.sdpa(), torch.no_grad():
        for seed in range(3):
            mask = torch.rand(2, 1, seqlen_q, 24, generator=torch.Generator().manual_seed(seed)) < 0.5
            mask[..., seed] = True
            output = attended(query, key, value, mask.to(device))
            right = exact(query, key, value, mask.to(device))
            torch.testing.assert_close(output.double(), right, rtol=0, atol=tolerance)
    report = flashmoe_science.report()
    assert (report.taken, report.declined) == (1, 0)


def test_lengths_of_a_graph_may_be_dynamic() -> None:
    torch._dynamo.reset()
    attended = torch.compile(
        lambda *given: F.scaled_dot_product_attention(*given),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    flashmoe_science.reset_report()
    with flashmoe_science.sdpa(), torch.no_grad():
        for seqlen_k in (8, 24, 40):
            query, key, value = tensors(2, 2, 2, 1, seqlen_k, "by head")
            mask = torch.rand(2, 1, 1, seqlen_k, generator=torch.Generator().manual_seed(1)) < 0.5
            mask[..., 0] = True
            output = attended(query, key, value, mask)
            torch.testing.assert_close(output.double(), exact(query, key, value, mask), rtol=0, atol=1e-5)
    assert flashmoe_science.report().declined == 0


@pytest.mark.parametrize("within_rows", [False, True], ids=["heads before rows", "heads within rows"])
def test_a_graph_may_view_the_output_as_pytorchs(within_rows: bool) -> None:
    query, key, value = tensors(2, 4, 4, 3, 24, "by head")
    query = query if within_rows else query.contiguous()
    mask = torch.rand(2, 1, 3, 24, generator=torch.Generator().manual_seed(0)) < 0.7

    def viewed(*arguments: torch.Tensor) -> torch.Tensor:
        output = F.scaled_dot_product_attention(*arguments)
        return output.transpose(1, 2).view(2, 3, 64) if within_rows else output.view(8, 3, 16)

    expected = viewed(query, key, value, mask)
    flashmoe_science.reset_report()
    with flashmoe_science.sdpa(), torch.no_grad():
        output = torch.compile(viewed, backend="aot_eager", fullgraph=True)(query, key, value, mask)
    assert (flashmoe_science.report().taken, flashmoe_science.report().declined) == (1, 0)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_what_goes_to_pytorch_says_why() -> None:
    query, key, value = tensors(2, 4, 2, 3, 24, "by head")
    mask = torch.ones(2, 1, 3, 24, dtype=torch.bool)
    assert why_not_listed(query, key, value, mask) is None
    assert why_not_listed(query, key, value, mask.float()) == "a mask that is added"
    rows = torch.ones(2, 4, 3, 24, dtype=torch.bool)
    assert why_not_listed(query, key, value, rows) == "a mask with rows of its own for heads"
    assert why_not_listed(query, key, value, rows[:, :1].expand(-1, 4, -1, -1)) is None
    assert why_not_listed(query, key, value, mask[..., :1]) == "a mask that broadcasts otherwise"
    too_many = rows[:, :1].expand(-1, 5, -1, -1)
    assert why_not_listed(query, key, value, too_many) == "a mask that broadcasts otherwise"
    assert (
        why_not_listed(query.clone().requires_grad_(), key, value, mask)
        == "a mask where a gradient is needed"
    )
    many = tensors(1, 2, 2, 200, 200, "by head")
    assert why_not_listed(*many, torch.ones(200, 200, dtype=torch.bool)) == "a mask of many queries"
    other = value.transpose(1, 2).contiguous().transpose(1, 2)
    assert why_not_listed(query, key, other, mask) == "keys and values in different layouts"


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(named or {}))


def test_lists_are_made_once_for_the_layers_of_a_step_and_anew_when_the_mask_changes() -> None:
    query, key, value = tensors(2, 4, 2, 1, 24, "by head")
    mask = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    for changed, made in ((False, True), (False, False), (True, True), (False, False)):
        if changed:
            mask[0, ..., :5] = False
        with _Operations() as operations:
            output = over_lists(query, key, value, mask, None)
        assert ("cumsum" in operations.names) == made
        assert "_local_scalar_dense" not in operations.names  # nothing is read back
        torch.testing.assert_close(output.double(), exact(query, key, value, mask), rtol=0, atol=1e-5)


def test_another_stream_makes_its_own_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches do not wait for those that another stream is making."""
    query, key, value = tensors(2, 4, 2, 1, 24, "by head")
    mask = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    for stream, made in ((7, True), (7, False), (8, True), (8, False)):
        monkeypatch.setattr(key_lists, "_stream_of", lambda tensor, stream=stream: stream, raising=False)
        with _Operations() as operations:
            over_lists(query, key, value, mask, None)
        assert ("cumsum" in operations.names) == made


def test_lists_under_inference_mode_are_made_anew() -> None:
    """Writes to its tensors are not counted."""
    query, key, value = tensors(1, 2, 2, 1, 8, "by head")
    with torch.inference_mode():
        mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
        over_lists(query, key, value, mask, None)
        mask[..., 4:] = False
        output = over_lists(query, key, value, mask, None)
        torch.testing.assert_close(output.double(), exact(query, key, value, mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["by token", "by head"])
def test_the_operator_is_clean(layout: str) -> None:
    query, key, value = tensors(2, 4, 2, 2, 24, layout)
    rows = rows_of(key)
    assert rows is not None
    mask = torch.rand(2, 1, 2, 24, generator=torch.Generator().manual_seed(1)) < 0.5
    arguments = (query, key, value, *lists_of(mask, 2, 2, rows.pitch), rows.pitch, 0.5)
    torch.library.opcheck(LISTED_KEYS, arguments)
    right = exact(query, key, value, mask, 0.5)
    torch.testing.assert_close(attend(*arguments).double(), right, rtol=0, atol=1e-5)


def test_the_operator_refuses_what_autograd_would_record_and_another_layout() -> None:
    query, key, value = tensors(2, 4, 2, 1, 24, "by head")
    lists = lists_of(torch.ones(1, 24, dtype=torch.bool), 2, 1, 48)
    with pytest.raises(flashmoe_science.InputError, match="requires a gradient"):
        LISTED_KEYS(query.requires_grad_(), key, value, *lists, 48)
    with pytest.raises(flashmoe_science.InputError, match="expected a pitch of 24 rows"):
        LISTED_KEYS(query.detach(), key, value, *lists, 24)


def test_operations_are_counted_as_pytorch_counts_its_own() -> None:
    query, key, value = tensors(2, 4, 4, 1, 24, "by head")
    mask = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    with FlopCounterMode(display=False) as ours:
        over_lists(query, key, value, mask, None)
    assert ours.get_total_flops() == 2 * 2 * 2 * 4 * 24 * 16


def test_a_machine_without_a_compiler_keeps_pytorchs_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "why_no_lists", lambda device, dtype: "DeviceError: no compiler")
    query, key, value = tensors(1, 2, 2, 1, 8, "by head")
    mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    attended = torch.compile(
        lambda *given: F.scaled_dot_product_attention(*given), fullgraph=True, backend="aot_eager"
    )
    flashmoe_science.reset_report()
    with flashmoe_science.sdpa(), torch.no_grad():
        attended(query, key, value, mask)
    assert flashmoe_science.report().reasons() == {"DeviceError: no compiler": 1}


@pytest.mark.gpu
def test_a_captured_graph_follows_the_mask_of_each_replay() -> None:
    """Also one that was read, or made into lists, before the capture."""
    for seqlen_q in (1, 64):
        query, key, value = tensors(2, 4, 2, seqlen_q, 1024, "by head", "cuda")
        mask = torch.zeros(2, 1, 1, 1024, dtype=torch.bool, device="cuda")
        mask[..., :7] = True

        def call(
            query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value
        ) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)  # noqa: B023

        graph = torch.cuda.CUDAGraph()
        with flashmoe_science.sdpa(), torch.no_grad():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                output = call()
        mask[0, ..., 3:700] = True
        mask[1, ..., :5] = False
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(output.double(), exact(query, key, value, mask), rtol=0, atol=2e-2)


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*arguments: Any) -> Any:
        raise AssertionError("the mask was read")

    monkeypatch.setattr(attention, "key_ranges", waits)
    query, key, value = tensors(2, 4, 2, 1, 64, "by head", "cuda")
    mask = torch.rand(2, 1, 1, 64, device="cuda") < 0.5
    mask[..., 0] = True
    flashmoe_science.reset_report()
    with flashmoe_science.sdpa(), torch.no_grad():
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    assert flashmoe_science.report().taken == 1
    torch.testing.assert_close(output.double(), exact(query, key, value, mask), rtol=0, atol=2e-2)
    assert key_ranges(mask, (2, 4, 1, 64)) == "a mask with gaps"
    assert key_lists._made
