"""attention_varlen on the CPU, against float64: packed and in pages, every option, every length that goes wrong."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpu_attention import DTYPES, each_dtype
from varlen_cases import NAN, Call, Shape, bounds, forget_calls, packed, paged
from varlen_reference import assert_as_exact_as_pytorch, exact_varlen

import bare_torch
from flashmoe_science import InputError, attention_varlen
from flashmoe_science.cpu import varlen as cpu
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.varlen import launch
from instruction_sets import each_instruction_set

BF16_LSE_ATOL = 4e-3
"""Where the processor multiplies pairs of bf16, weights are rounded before they are summed."""


def options_of(name: str, sequences: int, heads: int = 4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    sinks = torch.randn(heads, generator=generator)
    slopes = torch.rand(heads, generator=generator)
    of_sequences = torch.rand(sequences, heads, generator=generator)
    return {
        "causal": {},
        "full": {"causal": False},
        "window": {"window": (5, 0)},
        "two-sided": {"causal": False, "window": (9, 3)},
        "left-open": {"causal": False, "window": (-1, 2)},
        "only-itself": {"window": (0, 0)},
        "cap": {"softcap": 2.0},
        "sinks": {"sinks": sinks},
        "slopes": {"alibi_slopes": slopes},
        "scale": {"softmax_scale": 0.7},
        "cut": {"split_keys": 128},
        "all": {
            "window": (100, 0),
            "softcap": 5.0,
            "sinks": sinks,
            "alibi_slopes": of_sequences,
            "split_keys": 128,
        },
    }[name]


each_option = pytest.mark.parametrize(
    "option",
    [
        "causal",
        "full",
        "window",
        "two-sided",
        "left-open",
        "only-itself",
        "cap",
        "sinks",
        "slopes",
        "scale",
        "cut",
        "all",
    ],
)
LENGTHS = {
    "mixed": ((3, 1, 0, 70, 1), (5, 9, 2, 300, 0)),
    "decode": ((1, 1, 1), (1, 700, 1300)),
    "speculative": ((4, 8), (65, 130)),
    "more-queries-than-keys": ((5, 2, 66), (3, 0, 1)),
}
each_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
LAYOUTS = ("spare", "NHD", "HND", "interleaved")


def call_of(shape: Shape, layout: str, page_size: int = 16) -> Call:
    if layout == "packed":
        return packed(shape)
    if layout == "spare":
        return packed(shape, spare_rows=2, spare_keys=3)
    return paged(shape, page_size, layout=layout, spare_rows=1)


def attend(call: Call, shape: Shape, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attention_varlen(**call, **bounds(shape), **options, return_lse=True)  # type: ignore[arg-type]
    return out, lse


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def held_to(monkeypatch: pytest.MonkeyPatch, instruction_set: InstructionSet) -> None:
    """Calls take the kernel of an instruction set."""
    prepare = cpu.prepare
    forget_calls(monkeypatch)
    monkeypatch.setattr(cpu, "prepare", lambda problem, device: prepare(problem, device, instruction_set))


@each_instruction_set
@each_dtype
@each_lengths
@each_option
@pytest.mark.usefixtures("held_to")
def test_as_exact_as_pytorch(
    dtype: torch.dtype, lengths: tuple[tuple[int, ...], tuple[int, ...]], option: str
) -> None:
    shape = Shape(*lengths, head_dim=40, value_dim=24, dtype=dtype)
    options = options_of(option, len(lengths[0]))
    call = packed(shape)
    out, lse = attend(call, shape, **options)
    atol = BF16_LSE_ATOL if dtype is torch.bfloat16 else 2e-5
    assert_as_exact_as_pytorch(out, lse, call, atol, **options)
    rows = sum(lengths[0])
    for layout in LAYOUTS:
        in_layout, its_lse = attend(call_of(shape, layout), shape, **options)
        assert torch.equal(in_layout[:rows], out)
        assert torch.equal(its_lse[:rows], lse)
        assert (in_layout[rows:] == 0).all()
        assert (its_lse[rows:] == -math.inf).all()


@each_dtype
@pytest.mark.parametrize("page_size", [1, 7, 16, 32, 48, 64, 128, 256, 544])
def test_any_page_size_at_every_boundary(dtype: torch.dtype, page_size: int) -> None:
    keys = (0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, 3 * page_size + 1, 65)
    for queries in ((1,) * len(keys), (2, 1, 66, 3, 1, 70, 5, 4)):
        shape = Shape(queries, keys, dtype=dtype)
        call = paged(shape, page_size)
        out, lse = attend(call, shape)
        assert_as_exact_as_pytorch(out, lse, call, BF16_LSE_ATOL if dtype is torch.bfloat16 else 2e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (8, 8), (6, 2), (64, 8)])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (64, 64), (192, 128), (72, 256), (576, 512)])
def test_heads_and_dimensions(heads: int, kv_heads: int, head_dim: int, value_dim: int) -> None:
    shape = Shape((1, 5, 67), (40, 70, 67), heads, kv_heads, head_dim, value_dim)
    call = paged(shape, 16)
    out, lse = attend(call, shape)
    assert_as_exact_as_pytorch(out, lse, call)


@each_dtype
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("split_keys", [None, 128])
def test_the_same_bits_on_any_number_of_threads_and_wherever_keys_lie(
    dtype: torch.dtype, split_keys: int | None
) -> None:
    shape = Shape((1, 3, 150, 1), (2000, 1030, 700, 5000), head_dim=64, dtype=dtype)
    results = []
    for count, layout, page_size in (
        (1, "packed", 0),
        (2, "NHD", 16),
        (3, "HND", 48),
        (7, "joint", 1),
        (2, "NHD", 7),
    ):
        torch.set_num_threads(count)
        results.append(attend(call_of(shape, layout, page_size), shape, split_keys=split_keys))
    rows = sum(shape.queries)
    for out, lse in results[1:]:
        assert torch.equal(out[:rows], results[0][0])
        assert torch.equal(lse[:rows], results[0][1])


@each_dtype
@pytest.mark.parametrize("options", [{}, {"window": (200, 0), "softcap": 20.0}], ids=["causal", "window"])
def test_with_split_keys_bits_depend_neither_on_the_batch_nor_on_chunks(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    keys = 700
    shape = Shape((keys,), (keys,), head_dim=64, dtype=dtype)
    call = paged(shape, 16)
    whole, whole_lse = attend(call, shape, split_keys=128, **options)
    done = 0
    for rows in (1, 2, 63, 64, 65, 130, 1, 374):
        done += rows
        chunk = {
            **call,
            "query": torch.cat([call["query"][done - rows : done], call["query"][:5]]),
            "cu_seqlens_q": torch.tensor([0, rows, rows + 5], dtype=torch.int32),
            "seqused_k": torch.tensor([done, 333], dtype=torch.int32),
            "block_table": call["block_table"].repeat(2, 1),
        }
        out, lse = attend(chunk, shape, split_keys=128, **options)
        assert torch.equal(out[:rows], whole[done - rows : done])
        assert torch.equal(lse[:rows], whole_lse[done - rows : done])
    assert done == keys


@each_dtype
@pytest.mark.parametrize("queries", [1, 3, 90])
def test_hidden_keys_have_no_effect_whatever_they_hold(dtype: torch.dtype, queries: int) -> None:
    shape = Shape((queries,), (400,), dtype=dtype)
    call = paged(shape, 16)
    options: dict[str, Any] = {"window": (50, 0)}
    expected, expected_lse = attend(call, shape, **options)
    first_seen = 400 - queries - 50
    for poison in (NAN, math.inf, -math.inf):
        for position in range(first_seen):
            page = int(call["block_table"][0, position // 16])
            call["key"][page, position % 16] = poison
            call["value"][page, position % 16] = poison
        # A window's cache gives back pages that nobody sees any more.
        call["block_table"][0, : first_seen // 16] = -(2**30)
        out, lse = attend(call, shape, **options)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        call = paged(shape, 16)


@each_dtype
@pytest.mark.parametrize("queries", [1, 3, 90])
def test_packed_keys_before_a_window_have_no_effect_whatever_they_hold(
    dtype: torch.dtype, queries: int
) -> None:
    shape = Shape((20, queries), (30, 395), head_dim=64, dtype=dtype)
    call = packed(shape)
    expected, expected_lse = attend(call, shape, window=(50, 0))
    for name in ("key", "value"):
        call[name][30 : 30 + 395 - queries - 50] = NAN
    out, lse = attend(call, shape, window=(50, 0))
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@each_dtype
def test_nan_reaches_the_rows_that_see_it(dtype: torch.dtype) -> None:
    shape = Shape((6, 80), (90, 80), dtype=dtype)
    call = packed(shape)
    call["key"][86, 0] = NAN
    call["value"][90 + 40, 1, 3] = NAN
    out, lse = attend(call, shape)
    exact, exact_lse = exact_varlen(**call)
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(lse.isnan(), exact_lse.isnan())
    assert_as_exact_as_pytorch(out, None, call)


@pytest.mark.parametrize("sink", [-math.inf, -300.0, 0.0, 40.0, 300.0])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "cap"])
def test_sinks_of_any_size(sink: float, options: dict[str, Any]) -> None:
    shape = Shape((2, 1, 3), (30, 100, 0))
    call = paged(shape, 16)
    sinks = torch.tensor([sink, 0.5, sink, -1.0])
    out, lse = attend(call, shape, sinks=sinks, **options)
    assert_as_exact_as_pytorch(out, lse, call, sinks=sinks, **options)
    without, lse_without = attend(call, shape, **options)
    assert torch.equal(lse, lse_without)
    if sink == -math.inf:
        assert torch.equal(out[:, 0], without[:, 0])


@pytest.mark.parametrize("queries", [1, 40])
def test_a_nan_as_sink_is_seen_by_its_head(queries: int) -> None:
    shape = Shape((queries, 2), (30, 0))
    out, lse = attend(paged(shape, 16), shape, causal=False, sinks=torch.tensor([NAN, 0.5, 0.0, -1.0]))
    assert out[:queries, 0].isnan().all()
    assert not out[:, 1:].isnan().any()
    assert (out[queries:] == 0).all()
    assert not lse.isnan().any()


@each_dtype
@pytest.mark.parametrize("softcap", [1e-3, 0.5, 30.0, 1e4])
def test_caps_of_small_and_of_huge_scores(dtype: torch.dtype, softcap: float) -> None:
    for size in (1e-3, 1.0, 1e3):
        shape = Shape((3, 1), (50, 70), dtype=dtype)
        call = packed(shape)
        call["query"] *= size
        out, lse = attend(call, shape, softcap=softcap)
        assert_as_exact_as_pytorch(
            out, lse, call, BF16_LSE_ATOL if dtype is torch.bfloat16 else 1e-4, softcap=softcap
        )


def test_output_into_a_tensor_of_the_caller() -> None:
    shape = Shape((3, 2), (10, 20), value_dim=16)
    call = paged(shape, 4)
    expected = attention_varlen(**call, **bounds(shape))  # type: ignore[arg-type]
    storage = torch.full((5, 2, 4, 24), 7.0)
    out = storage[:, 1, :, 3:19]
    assert attention_varlen(**call, **bounds(shape), out=out) is out  # type: ignore[arg-type]
    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert (storage == 7.0).all()


def test_queries_of_any_strides() -> None:
    shape = Shape((3, 2), (10, 20), heads=2)
    call = packed(shape)
    expected = attend(call, shape)[0]
    joint = torch.full((5, 3, 2, 32), NAN)
    joint[:, 1] = call["query"]
    assert torch.equal(attend({**call, "query": joint[:, 1]}, shape)[0], expected)
    by_heads = call["query"].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend({**call, "query": by_heads}, shape)[0], expected)


def test_pages_shared_by_sequences() -> None:
    shape = Shape((2,), (50,))
    call = paged(shape, 16)
    twice = {
        **call,
        "query": call["query"].repeat(3, 1, 1),
        "cu_seqlens_q": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "block_table": call["block_table"].repeat(3, 1),
        "seqused_k": call["seqused_k"].repeat(3),
    }
    out, _ = attend(twice, shape)
    expected, _ = attend(call, shape)
    assert torch.equal(out, expected.repeat(3, 1, 1))


def test_nothing_at_all() -> None:
    shape = Shape((), ())
    assert attend(packed(shape), shape)[0].shape == (0, 4, 32)
    out, lse = attend(paged(shape, 16, spare_rows=2), shape)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    empty = Shape((2, 0), (0, 0))
    out, lse = attend(packed(empty), empty)
    assert out.shape == (2, 4, 32)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_a_cache_beyond_two_to_the_31_elements() -> None:
    # Only its last page is ever touched.
    pages = 2**31 // (16 * 2 * 32) + 1
    key, value = (torch.empty(pages, 16, 2, 32, dtype=torch.bfloat16) for _ in range(2))
    shape = Shape((1,), (16,), dtype=torch.bfloat16)
    small = paged(shape, 16, spare_pages=0)
    key[-1], value[-1] = small["key"][0], small["value"][0]
    call = {
        **small,
        "key": key,
        "value": value,
        "block_table": torch.tensor([[pages - 1]], dtype=torch.int32),
    }
    assert torch.equal(attend(call, shape)[0], attend(small, shape)[0])


GOOD = paged(Shape((3, 1), (5, 9)), 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": [1, 3, 4]}, r"cu_seqlens_q\[0\] is 1"),
        ({"cu_seqlens_q": [0, 3, 2]}, r"cu_seqlens_q\[2\] is 2.*never to fall"),
        ({"cu_seqlens_q": [0, 3, 5]}, r"cu_seqlens_q\[2\] is 5; .* end at 4"),
        ({"seqused_k": [5, 21]}, r"seqused_k\[1\] is 21; .* pages hold"),
        ({"seqused_k": [-1, 9]}, r"seqused_k\[0\] is -1"),
        ({"block_table": [[0, 1, 0], [2, 99, 3]]}, "page 99 for sequence 1; expected pages from 0 to 7"),
        ({"block_table": [[0, -1, 0], [2, 4, 3]]}, "page -1 for sequence 0"),
    ],
)
def test_lengths_and_pages_outside_their_tensors_are_refused(changes: dict[str, Any], message: str) -> None:
    call = {**GOOD, **{name: torch.tensor(values, dtype=torch.int32) for name, values in changes.items()}}
    with pytest.raises(InputError, match=message) as refusal:
        attend(call, Shape((3, 1), (5, 9)))
    assert "\n" not in str(refusal.value)


def test_packed_lengths_outside_their_tensors_are_refused() -> None:
    shape = Shape((3, 1), (5, 9))
    call = packed(shape)
    for starts, message in (([0, 5, 15], r"cu_seqlens_k\[2\] is 15"), ([0, 5, 4], r"cu_seqlens_k\[2\] is 4")):
        with pytest.raises(InputError, match=message):
            attend({**call, "cu_seqlens_k": torch.tensor(starts, dtype=torch.int32)}, shape)
    with pytest.raises(InputError, match=r"seqused_k\[0\] is 6; .* part of the packed keys has"):
        attend({**call, "seqused_k": torch.tensor([6, 9], dtype=torch.int32)}, shape)


def test_a_growing_batch_makes_no_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    prepare = cpu.prepare
    forget_calls(monkeypatch)
    monkeypatch.setattr(cpu, "prepare", lambda *arguments: prepared.append(arguments) or prepare(*arguments))
    for step in range(1, 60):
        shape = Shape((1,) * (step % 5 + 1), (step,) * (step % 5 + 1))
        attend(paged(shape, 16), shape)
    assert len(prepared) == 1


def test_10_000_growing_steps_make_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of up to 8 sequences, whose number changes too; and nothing is kept for each step."""
    prepared = []
    prepare = cpu.prepare
    forget_calls(monkeypatch)
    monkeypatch.setattr(cpu, "prepare", lambda *arguments: prepared.append(arguments) or prepare(*arguments))
    call = paged(Shape((1,) * 8, (1250,) * 8, heads=2, kv_heads=1, head_dim=8), 16)
    starts = torch.arange(9, dtype=torch.int32)
    for step in range(10_000):
        batch, keys = step % 8 + 1, step // 8 + 1
        attention_varlen(
            call["query"][:batch],
            call["key"],
            call["value"],
            cu_seqlens_q=starts[: batch + 1],
            block_table=call["block_table"][:batch],
            seqused_k=torch.full((batch,), keys, dtype=torch.int32),
            max_seqlen_q=1,
            max_seqlen_k=keys,
            return_lse=step % 2 == 0,
        )
    assert keys == 1250
    assert len(prepared) == 2  # with and without the log-sum-exp
    assert len(launch._runs) == 2
    assert len(launch.of_thread.recent) <= 2


def test_every_dtype_is_tested() -> None:
    assert set(DTYPES) == {torch.float32, torch.bfloat16, torch.float16}


@pytest.mark.parametrize("name", ["out", "seqused_k", "block_table"])
def test_tensors_whose_memory_was_given_back_are_refused(name: str) -> None:
    call = {**paged(Shape((1, 2), (5, 9)), 4), "out": torch.zeros(3, 4, 32)}
    call[name] = call[name].clone()
    call[name].untyped_storage().resize_(0)
    with pytest.raises(InputError, match="has no memory"):
        attention_varlen(**call, max_seqlen_q=2, max_seqlen_k=9)  # type: ignore[arg-type]


_MANY_PARTS = """
import resource
import torch
from flashmoe_science import attention_varlen

SEQUENCES, KEYS, PAGE = 64, 1 << 14, 1 << 12
torch.manual_seed(0)
query, key, value = torch.randn(SEQUENCES, 8, 8), torch.randn(2, PAGE, 8, 8), torch.randn(2, PAGE, 8, 128)


def attend(sequences):
    return attention_varlen(
        query[:sequences], key, value,
        cu_seqlens_q=torch.arange(sequences + 1, dtype=torch.int32), max_seqlen_q=1, max_seqlen_k=KEYS,
        block_table=torch.tensor([[0, 1, 1, 0]] * sequences, dtype=torch.int32),
        seqused_k=torch.full((sequences,), KEYS, dtype=torch.int32), split_keys=128, return_lse=True,
    )


one, one_lse = attend(1)
with open("/proc/self/statm") as sizes:
    now = int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (400 << 20), resource.RLIM_INFINITY))
every, every_lse = attend(SEQUENCES)
assert torch.equal(every[:1], one) and torch.equal(every_lse[:1], one_lse)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sums_of_many_parts_take_no_memory_that_grows() -> None:
    """65,536 parts would take more. The bits are those of a call with few of them."""
    done = bare_torch.run(_MANY_PARTS)
    assert done.returncode == 0, done.stderr
