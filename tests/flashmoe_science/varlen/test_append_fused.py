"""`paged_append` as one kernel, on the CPU and emulated for CUDA, against PyTorch's operations."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_for import each_architecture
from emulated import NEEDS_COMPILER, compile_emulation

from flashmoe_science import InputError, paged_append
from flashmoe_science.cpu import append as cpu
from flashmoe_science.cuda.varlen import append as cuda
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.jit.nvrtc import compile_kernel
from flashmoe_science.varlen.append import composed
from flashmoe_science.varlen.append_arguments import ARGUMENTS, Append, pack_into, why_not
from flashmoe_science.varlen.transform import Rotary
from instruction_sets import each_instruction_set

Run = Callable[[Append, torch.Tensor | None], None]
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
TOKENS, HEADS, KV_HEADS, PAGES, PAGE = 13, 6, 2, 5, 8


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    return compile_emulation(cuda.kernel(dtype, "sm_90"), "AppendParameters")


def emulated(append: Append, query_out: torch.Tensor | None) -> None:
    buffer = ctypes.create_string_buffer(ARGUMENTS.size)
    pack_into(buffer, append, query_out)
    library(append.key.dtype).run(buffer, -(-append.rows // cuda.WARPS))


def append_of(
    dtype: torch.dtype = BF16,
    *,
    scales: str = "",
    norm: bool = False,
    rotary: bool = False,
    interleaved: bool = False,
    rotary_dim: int = 0,
    head_dim: int = 40,
    value_dim: int = 24,
    numbers: torch.dtype = torch.float32,
    indices: torch.dtype = torch.int64,
    query: bool = True,
    layout: str = "NHD",
) -> Append:
    """Slots in any order, one of them negative; caches full of ones."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def cache(dim: int) -> torch.Tensor:
        shape = (PAGES, KV_HEADS, PAGE, dim) if layout == "HND" else (PAGES, PAGE, KV_HEADS, dim)
        made = torch.ones(shape).to(FP8 if scales else dtype)
        return made.transpose(1, 2) if layout == "HND" else made

    def scale() -> torch.Tensor | None:
        made = {
            "all": torch.tensor(0.0131),
            "head": torch.tensor([0.0131, 0.0177]),
            "key": torch.full((PAGES, PAGE, KV_HEADS), 7.0),
        }
        return made.get(scales)

    slots = torch.randperm(PAGES * PAGE, generator=generator)[:TOKENS].to(indices)
    slots[4] = -1
    rotary_dim = rotary_dim or head_dim
    together = normal(TOKENS, HEADS + 2 * KV_HEADS, max(head_dim, value_dim)).to(dtype)
    turns = Rotary(normal(50, rotary_dim).to(numbers), torch.arange(TOKENS).to(indices) * 3 - 2, interleaved)
    return Append(
        together[:, HEADS : HEADS + KV_HEADS, :head_dim],
        together[:, HEADS + KV_HEADS :, :value_dim],
        cache(head_dim),
        cache(value_dim),
        slots,
        scale(),
        scale(),
        together[:, :HEADS, :head_dim] if query and (norm or rotary) else None,
        turns if rotary else None,
        normal(head_dim).to(numbers) if norm else None,
        normal(head_dim).to(numbers) if norm else None,
        1e-6,
    )


def written(append: Append, run: Run | None) -> dict[str, torch.Tensor]:
    """What a call leaves and returns; its own caches stay as they are."""
    names = ("key_cache", "value_cache", "key_scale", "value_scale")
    own = append._replace(
        **{name: each.clone() for name in names if (each := getattr(append, name)) is not None}
    )
    if run is None:
        out = composed(own)
    else:
        out = None
        if own.query is not None:  # where the rows are: a kernel writes to addresses of its own device
            out = torch.full(own.query.shape, torch.nan, dtype=own.query.dtype, device=own.query.device)
        run(own, out)
    result = {"query": out} | {name: getattr(own, name) for name in names}
    return {name: tensor for name, tensor in result.items() if tensor is not None}


def assert_as_composed(run: Run, append: Append, exactly: bool, there: Append | None = None) -> None:
    """Exactly, or where sums may have another order within a rounding of the result's type.

    Args:
        append: on the CPU, where PyTorch divides by numbers; on a GPU it multiplies by what is 1 / number.
        there: the same call elsewhere, which ``run`` is to make.
    """
    expected = written(append, None)
    for name, result in written(append if there is None else there, run).items():
        ours, theirs = result.cpu(), expected[name]
        if exactly:
            assert torch.equal(_bytes(ours), _bytes(theirs)), name
        elif ours.dtype is FP8:
            # Codes of one sign follow one another: a tie may fall to either side.
            steps = ours.view(torch.uint8).int() - theirs.view(torch.uint8).int()
            assert steps.abs().max() <= 1, name
            assert (steps != 0).float().mean() < 0.01, name
        else:
            eps = torch.finfo(ours.dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=max(eps, 1e-6), atol=1e-6)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


VARIANTS: dict[str, dict[str, Any]] = {
    "copy": {},
    "copy, 32-bit slots, heads before tokens": {"indices": torch.int32, "layout": "HND"},
    "halves": {"rotary": True},
    "neighbours, part of the head": {"rotary": True, "interleaved": True, "rotary_dim": 16},
    "32-bit positions": {"rotary": True, "indices": torch.int32, "rotary_dim": 24},
    "no query": {"rotary": True, "query": False},
    "norm": {"norm": True},
    "norm and halves": {"norm": True, "rotary": True},
    "numbers of the rows' type": {"norm": True, "rotary": True, "numbers": None},
    "wide": {"norm": True, "rotary": True, "head_dim": 576, "value_dim": 512, "rotary_dim": 64},
    **{f"fp8 {scales}": {"scales": scales, "rotary": True} for scales in ("all", "head", "key", "none")},
    "fp8, normed": {"scales": "key", "norm": True, "rotary": True, "layout": "HND"},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def append_for(variant: str, dtype: torch.dtype) -> tuple[Append, bool]:
    options = dict(VARIANTS[variant])
    if "numbers" in options:
        options["numbers"] = dtype
    return append_of(dtype, **options), not options.get("norm", False)


@each_variant
@pytest.mark.parametrize("dtype", [BF16, FP16])
@NEEDS_COMPILER
def test_emulated(variant: str, dtype: torch.dtype) -> None:
    append, exactly = append_for(variant, dtype)
    assert why_not(append, (dtype,)) is None
    assert_as_composed(emulated, append, exactly)


@each_instruction_set
@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
def test_on_the_cpu(variant: str, dtype: torch.dtype, instruction_set: InstructionSet) -> None:
    append, exactly = append_for(variant, dtype)
    assert cpu.takes(append)
    assert_as_composed(lambda each, out: cpu.run(each, out, instruction_set), append, exactly)


each_run = pytest.mark.parametrize("run", [pytest.param(emulated, marks=NEEDS_COMPILER), cpu.run])


@each_run
def test_every_float_is_rounded_to_fp8_as_pytorch_does(run: Run) -> None:
    """All of float16: ties, subnormal numbers, zeros of both signs, what saturates, infinities."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(FP16).view(-1, 1, 512)
    tokens = values.shape[0]
    cache = torch.zeros(tokens, 1, 1, 512).to(FP8)
    append = Append(values, values, cache, cache, torch.arange(tokens), *(None,) * 6, 1e-6)
    expected, ours = written(append, None), written(append, run)
    for name in ("key_cache", "value_cache"):
        nan = expected[name].float().isnan()
        assert torch.equal(ours[name].float().isnan(), nan)
        assert torch.equal(ours[name].view(torch.uint8)[~nan], expected[name].view(torch.uint8)[~nan])


@each_run
def test_rows_of_zeros_and_rows_with_nan_have_scales(run: Run) -> None:
    append = append_of(scales="key")
    append.key[0] = 0.0
    append.key[1, 0, 3] = torch.nan
    append.key[2, 1, 5] = torch.inf
    expected, ours = written(append, None), written(append, run)
    torch.testing.assert_close(ours["key_scale"], expected["key_scale"], rtol=0.0, atol=0.0, equal_nan=True)
    torch.testing.assert_close(
        ours["key_cache"].float(), expected["key_cache"].float(), rtol=0.0, atol=0.0, equal_nan=True
    )


def test_many_tokens_on_several_threads() -> None:
    tokens = 400
    key = torch.randn(tokens, 4, 64).to(BF16)
    caches = [torch.zeros(50, 8, 4, 64, dtype=BF16) for _ in range(2)]
    slots = torch.randperm(tokens)
    paged_append(key, -key, *caches, slots)
    assert torch.equal(caches[0].flatten(0, 1)[slots], key)
    assert torch.equal(caches[1].flatten(0, 1)[slots], -key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a._replace(key=a.key.double()), "rows are of one of"),
        (lambda a: a._replace(key_norm=a.key_norm.double()), "float32, or of the rows' dtype"),
        (lambda a: a._replace(value=a.value.transpose(1, 2).contiguous().transpose(1, 2)), "contiguous"),
        (lambda a: a._replace(query=a.query[:5]), "as many tokens"),
        (lambda a: a._replace(key=a.key[..., :1].expand(-1, -1, 580)), "contiguous|at most 576"),
        (lambda a: a._replace(value=torch._neg_view(a.value)), "subclass, or a transform"),
    ],
)
def test_what_a_kernel_does_not_take_is_composed(change: Callable[[Append], Append], words: str) -> None:
    append = change(append_of(norm=True))
    reason = why_not(append, (BF16, FP16))
    assert reason is not None
    assert any(word in reason for word in words.split("|"))


def test_a_value_with_gaps_is_still_appended() -> None:
    append = append_of()
    gaps = append.value.transpose(1, 2).contiguous().transpose(1, 2)
    paged_append(append.key, gaps, append.key_cache, append.value_cache, append.slot_mapping)
    kept = append.slot_mapping >= 0
    assert torch.equal(append.value_cache.flatten(0, 1)[append.slot_mapping[kept]], append.value[kept])


@pytest.mark.parametrize("position", [50, -51])
def test_positions_outside_the_table_are_refused(position: int) -> None:
    append = append_of(rotary=True)
    assert append.rotary is not None
    append.rotary.positions[0] = position
    with pytest.raises(InputError, match=f"positions names row {position}"):
        paged_append(*append[:5], rotary=append.rotary)


@pytest.mark.parametrize(
    "name", ["query", "value", "key_cache", "slot_mapping", "key_scale", "query_norm", "key_norm", "rotary"]
)
def test_what_lies_on_another_device_is_refused_in_one_line(name: str) -> None:
    """A kernel of one device writes to the addresses of another wherever they point."""
    append = append_of(scales="head", norm=True, rotary=True)
    given = {name: tensor for name, tensor in append._asdict().items() if name != "eps"}
    if name == "rotary":
        assert append.rotary is not None
        given[name] = append.rotary._replace(positions=append.rotary.positions.to("meta"))
    else:
        given[name] = given[name].to("meta")
    with pytest.raises(InputError, match=r"^[^\n]* is on meta(:0)? but key is on cpu[^\n]*$"):
        paged_append(**given)


def test_on_cuda_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_APPEND", "composed")
    assert not cuda.is_asked_for()
    monkeypatch.setenv("FLASHMOE_CUDA_APPEND", "fused")
    assert cuda.is_asked_for()
    monkeypatch.setattr(cuda, "_DEFAULT", "composed")
    monkeypatch.setenv("FLASHMOE_CUDA_APPEND", "")
    assert not cuda.is_asked_for()
    monkeypatch.setenv("FLASHMOE_CUDA_APPEND", "yes")
    with pytest.raises(InputError, match="expected one of composed, fused"):
        cuda.is_asked_for()


@each_architecture(["sm_75", "sm_80", "sm_90", "sm_100"])
def test_it_compiles_without_spills(architecture: str, nvrtc: None) -> None:
    for dtype in (FP16,) if architecture == "sm_75" else (FP16, BF16):
        compile_kernel(cuda.kernel(dtype, architecture))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_variant
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_on_a_gpu(variant: str, dtype: torch.dtype) -> None:
    append, exactly = append_for(variant, dtype)
    there = Append(*(_moved(each) for each in append))
    assert cuda.takes(there)
    assert_as_composed(cuda.run, append, exactly, there)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_is_replayed_after_slots_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_CUDA_APPEND", "fused")
    append = Append(*(_moved(each) for each in append_of(scales="key", norm=True, rotary=True)))
    options = {"query": append.query, "rotary": append.rotary, "query_norm": append.query_norm}
    options |= {"key_norm": append.key_norm}
    scales = {"key_scale": append.key_scale, "value_scale": append.value_scale}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the stream does not wait for the one on which the tensors were made
    with torch.cuda.stream(stream):
        paged_append(*append[:5], **options, **scales)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = paged_append(*append[:5], **options, **scales)  # type: ignore[arg-type]
    append.slot_mapping.copy_(torch.randperm(PAGES * PAGE)[:TOKENS])
    append.key.copy_(append.key * 2)
    expected = written(append, None)
    graph.replay()
    torch.cuda.synchronize()
    assert out is not None
    torch.testing.assert_close(out, expected["query"], rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(append.key_scale, expected["key_scale"], rtol=1e-6, atol=0.0)


def _moved(each: Any) -> Any:
    if isinstance(each, Rotary):
        return Rotary(each.cos_sin.cuda(), each.positions.cuda(), each.interleaved)
    if not isinstance(each, torch.Tensor):
        return each
    moved = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
    return moved.copy_(each)
