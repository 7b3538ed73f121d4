"""The CUDA backend on a GPU: every kernel's results against float64, for every kind of call."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_attention import assert_right, choices, random, random_qkv, reference, run_guarded

import flashmoe_science
from flashmoe_science.configs.attention import hopper as hopper_configs
from flashmoe_science.configs.attention import portable as configs
from flashmoe_science.configs.attention.hopper import HopperConfiguration
from flashmoe_science.cuda.attention import KernelKind, explain, forward
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.errors import DeviceError, InputError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def takes_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


# The length pairs of FlashAttention's tests.
PAIRS = [
    *[(1, 1), (3, 3), (64, 32), (64, 128), (128, 192), (256, 256), (255, 256), (239, 1), (799, 3)],
    *[(113, 203), (113, 128), (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128)],
    *[(512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048), (4096, 4096), (4224, 4224)],
]
# No keys; a row or a key more or less than a tile; one query against many keys.
MORE_PAIRS = [(64, 0), (5, 0), (65, 129), (129, 65), (191, 177), (193, 97), (1, 4097), (64, 4095)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), PAIRS + MORE_PAIRS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths(seqlen_q: int, seqlen_k: int, head_dim: int, causal: bool) -> None:
    long = seqlen_q * seqlen_k > 1 << 22
    batch, heads = (1, (2, 1)) if long else (2, (6, 2))
    assert_right(*random_qkv((seqlen_q, seqlen_k), head_dim, batch=batch, heads=heads), causal=causal)


def test_no_queries() -> None:
    q, k, v = random_qkv((0, 64), 64)
    out, lse = forward(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert lse is not None
    assert lse.shape == q.shape[:3]


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    for causal in (False, True):
        assert_right(*random_qkv((150, 170), head_dim, dtype=dtype), causal=causal)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_layouts(head_dim: int) -> None:
    """Rows before heads; keys and values in one tensor; all heads and batches sharing keys; one dimension of 1."""
    q, k, v = random_qkv((333, 289), head_dim, heads=(4, 2), rows_first=True)
    assert_right(q, k, v, causal=True, rows_first=True)
    packed = torch.randn(2, 289, 3, 4, head_dim, device="cuda", dtype=torch.float16)
    assert_right(*(x.transpose(1, 2) for x in packed.unbind(2)), causal=True)
    one = torch.randn(1, 1, 289, head_dim, device="cuda", dtype=torch.bfloat16)
    assert_right(q, one.expand(2, 2, -1, -1), one.expand(2, 1, -1, -1).expand(2, 2, -1, -1), causal=False)
    assert_right(q[:1, :1], k[:1, :1], v[:1, :1], causal=True)
    spread = random(2, 4, 600, head_dim, dtype=torch.bfloat16)
    assert_right(q, spread[:, ::2, :578:2], spread[:, 1::2, 1:579:2], causal=False)


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_grouped_heads(kv_heads: int, head_dim: int) -> None:
    for causal in (False, True):
        q, k, v = random_qkv((300, 333), head_dim, batch=3, heads=(6, kv_heads), dtype=torch.float16)
        assert_right(q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 130), (200, 200), (600, 600)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_scale_of_zero(head_dim: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    """Finite scores become 0, so outputs are means; 0 times infinity is NaN, and masked keys stay masked."""
    q, k, v = random_qkv((seqlen_q, seqlen_k), head_dim)
    q[0, 0, 0, 5], k[0, 1, seqlen_k // 2, 7] = -math.inf, math.inf
    exact, exact_lse = reference(q.float() * 0, k, v, causal, 1.0, torch.float64)
    out, lse = forward(q, k, v, causal=causal, softmax_scale=0.0, return_lse=True)
    assert lse is not None
    torch.testing.assert_close(out.double(), exact, atol=4e-3, rtol=8e-3, equal_nan=True)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-5, equal_nan=True)
    assert exact.isnan().any()
    assert exact.isfinite().any()


@pytest.mark.parametrize("top", [2.9e38, 3.2e38])
def test_scores_near_the_least_number(top: float) -> None:
    """Every score of a row, in units of log2, is near the least finite float: all keys count the same."""
    q, k, v = random_qkv((200, 200), 64)
    q.zero_()
    k.zero_()
    q[..., 0], k[..., 0] = 2.0**63, -(2.0**64)
    scale = top / 2.0**127 / math.log2(math.e)
    assert_right(q, k, v, causal=False, scale=scale)


@pytest.mark.parametrize("scale", [-0.3, 1e-6, 1.0])
def test_softmax_scales(scale: float) -> None:
    for head_dim in (64, 128):
        assert_right(*random_qkv((200, 200), head_dim), causal=True, scale=scale)


def test_the_log_sum_exp_is_optional() -> None:
    q, k, v = random_qkv((300, 200), 64)
    for choice in choices(q, k, v, causal=True):
        with_lse, _ = run_guarded(choice, q, k, v, causal=True)
        without, _ = run_guarded(choice, q, k, v, causal=True, return_lse=False)
        assert torch.equal(with_lse, without), choice


# --- inputs that are hard to get right

LARGE_SCORES_ERROR = 0.04
"""Values of up to 4 with the roundings of weights and output to bfloat16, and of scores of 400 to float32."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first_is_largest", [False, True])
def test_scores_that_keep_growing(
    head_dim: int, causal: bool, first_is_largest: bool, dtype: torch.dtype
) -> None:
    """By e^12 every 32 keys, in one direction or the other.

    Whatever a kernel assumed of the maximum is wrong in every block that it comes to: the Hopper kernel, which
    goes from the last key to the first, does all blocks but one a second time.
    """
    q, k, v = random_qkv((200, 960), head_dim, dtype=dtype)
    step = 12 / (4 * math.sqrt(head_dim))  # q of 4 and keys of r give scores of 4 sqrt(head_dim) r
    level = torch.arange(960, device="cuda").div(32, rounding_mode="floor") * step
    level = level.flip(0) if first_is_largest else level
    q.copy_(4 + 0.3 * q)
    k.copy_(level[:, None] + 0.1 * k)
    assert_right(q, k, v, causal=causal, most=LARGE_SCORES_ERROR)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_large_scores(head_dim: int, causal: bool) -> None:
    q, k, v = random_qkv((500, 500), head_dim)
    assert_right(q * 30, k, v, causal=causal, most=LARGE_SCORES_ERROR)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_dominant_key(head_dim: int) -> None:
    """First, last, and on either side of the edges of fragments and tiles."""
    edges = {edge for size in (8, 16, 32, 48, 64, 80, 96, 128) for edge in (size - 1, size)}
    for position in sorted(edges | {0, 255, 256, 299, 300}):
        q, k, v = random_qkv((130, 301), head_dim, batch=1, heads=(2, 2))
        q.abs_()
        k[:, :, position] = 4.0
        for causal in (False, True):
            assert_right(q, k, v, causal=causal, most=LARGE_SCORES_ERROR)


def test_equal_scores() -> None:
    q, k, v = random_qkv((500, 500), 64)
    k.copy_(k[:, :, :1].expand_as(k))
    for causal in (False, True):
        assert_right(q, k, v, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_nan_stays_in_its_rows(head_dim: int) -> None:
    """The rows beside it keep their values; not their bits, which may depend on what a warp's rows do together."""
    q, k, v = random_qkv((300, 300), head_dim)
    rows = torch.arange(300, device="cuda")
    bad_query, bad_key = q.clone(), k.clone()
    bad_query[:, :, 17] = math.nan
    bad_key[:, :, 140] = math.nan  # seen by the rows from its own on
    for choice in choices(q, k, v, causal=True):
        clean, clean_lse = run_guarded(choice, q, k, v, causal=True)
        assert clean_lse is not None
        for query, key, spoilt in ((bad_query, k, rows == 17), (q, bad_key, rows >= 140)):
            out, lse = run_guarded(choice, query, key, v, causal=True)
            assert lse is not None
            assert out[:, :, spoilt].isnan().all(), choice
            assert lse[:, :, spoilt].isnan().all(), choice
            torch.testing.assert_close(out[:, :, ~spoilt], clean[:, :, ~spoilt], atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(lse[:, :, ~spoilt], clean_lse[:, :, ~spoilt], atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_infinities(head_dim: int) -> None:
    q, k, v = random_qkv((300, 520), head_dim)
    q.abs_()
    hidden = k.clone()
    # Keys of weight zero: a few, and all of the blocks at the end, where kernels begin.
    hidden[:, :, 100:105, 0] = -math.inf
    hidden[:, :, 300:, 0] = -math.inf
    for choice in choices(q, k, v, causal=False):
        exact, exact_lse = reference(q, hidden, v, False, head_dim**-0.5, torch.float64)
        out, lse = run_guarded(choice, q, hidden, v, causal=False)
        torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-5)  # type: ignore[union-attr]
        clean, _ = run_guarded(choice, q, k, v, causal=False)
        infinite = v.clone()
        infinite[:, :, 77, 3] = math.inf
        out, _ = run_guarded(choice, q, k, infinite, causal=False)
        assert (out[..., 3] == math.inf).all(), choice
        other = torch.arange(head_dim, device="cuda") != 3
        assert torch.equal(out[..., other], clean[..., other]), choice
        endless = k.clone()
        endless[:, :, 77, 3] = math.inf
        out, _ = run_guarded(choice, q, endless, v, causal=False)
        assert out.isnan().all(), choice


# --- configurations


@pytest.mark.parametrize("architecture", configs.tuned_architectures())
@pytest.mark.parametrize("head_dim", configs.HEAD_DIMS)
def test_every_architectures_tiles_on_this_gpu(architecture: str, head_dim: int) -> None:
    dtype = torch.float16 if architecture == "sm_75" else torch.bfloat16
    q, k, v = random_qkv((301, 257), head_dim, heads=(4, 2), dtype=dtype)
    tiles = [tile for tile in configs.all_configurations(architecture) if tile.head_dim == head_dim]
    only = [Choice(KernelKind.PORTABLE, tile) for tile in tiles]
    for causal in (False, True):
        assert_right(q, k, v, causal=causal, only=only)


@pytest.mark.skipif(not takes_hopper(), reason="needs sm_90")
@pytest.mark.parametrize("tile", hopper_configs.all_configurations(), ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "batch"),
    # Fewer tiles than multiprocessors; twice as many and more, drawn as tickets; rows and keys that fill no tile.
    [
        ((64, 64), (2, 1), 1),
        ((301, 257), (4, 2), 2),
        ((129, 1000), (3, 3), 3),
        ((2047, 2049), (20, 4), 1),
        ((700, 700), (64, 64), 2),
    ],
)
def test_every_hopper_tile(
    tile: HopperConfiguration, lengths: tuple[int, int], heads: tuple[int, int], batch: int
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = random_qkv(lengths, tile.head_dim, heads=heads, batch=batch, dtype=dtype)
        assert_right(q, k, v, causal=tile.causal, only=[Choice(KernelKind.HOPPER, tile)])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(1024, 1024), (1023, 2111), (2000, 4000), (4224, 4224)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_thousand_times_the_same_bits(head_dim: int, lengths: tuple[int, int], causal: bool) -> None:
    q, k, v = random_qkv(lengths, head_dim, batch=1, heads=(2, 1))
    for choice in choices(q, k, v, causal=causal):
        first, first_lse = forward(q, k, v, causal=causal, return_lse=True, choice=choice)
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            out, lse = forward(q, k, v, causal=causal, return_lse=True, choice=choice)
            different += (out != first).sum() + (lse != first_lse).sum()
        assert different.item() == 0, choice


def test_heads_do_not_depend_on_their_neighbours() -> None:
    q, k, v = random_qkv((333, 333), 64, batch=3, dtype=torch.float16)
    for choice in choices(q, k, v, causal=True):
        whole, _ = forward(q, k, v, causal=True, choice=choice)
        for batch in range(3):
            alone = (x[batch : batch + 1, 2:3] for x in (q, k, v))
            out, _ = forward(*alone, causal=True, choice=choice)
            assert torch.equal(out[0, 0], whole[batch, 2]), choice


def test_the_output_has_the_querys_layout() -> None:
    q = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.float16).transpose(1, 2)
    out, _ = forward(q, q, q)
    assert out.stride() == q.stride()


_CAPTURE_FIRST = """
import torch
from flashmoe_science.cuda.attention import forward
from flashmoe_science.errors import DeviceError
q = torch.randn(1, 1, 64, 64, device="cuda", dtype=torch.float16)
counter = torch.zeros(1, device="cuda")
counter += 1
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
refused = ""
with torch.cuda.graph(graph):
    counter += 1
    try:
        forward(q, q, q)
    except DeviceError as error:
        refused = str(error)
print(refused)
graph.replay()
out, _ = forward(q, q, q)
torch.cuda.synchronize()
assert counter.item() == 2, counter
assert out.isfinite().all()
"""


def test_a_first_call_under_capture_is_refused(tmp_path: Path) -> None:
    """And neither spoils the capture nor the calls after it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(flashmoe_science.__file__).parent.parent),
        "FLASHMOE_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", _CAPTURE_FIRST]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert "call the function once with these shapes before capturing" in run.stdout


def test_only_the_output_is_allocated() -> None:
    q, k, v = (torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    forward(q, k, v)  # the first call on a device may allocate what all calls share
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = forward(q, k, v)
    assert torch.cuda.max_memory_allocated() - before == out.numel() * 2


def test_unusable_layouts_are_refused() -> None:
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(InputError, match=r"last dimension of key is not contiguous"):
        forward(q, q.transpose(2, 3), q)
    odd = torch.randn(1, 2, 64, 66, device="cuda", dtype=torch.float16)[..., :64]
    with pytest.raises(InputError, match=r"value has strides .*multiples of 16 bytes"):
        forward(q, q, odd)
    shifted = torch.randn(1 * 2 * 64 * 64 + 1, device="cuda", dtype=torch.float16)[1:].view(1, 2, 64, 64)
    with pytest.raises(InputError, match=r"query does not start at a multiple of 16 bytes"):
        forward(shifted, q, q)


def test_the_environment_overrides_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 72, 64, device="cuda", dtype=torch.float16)
    monkeypatch.setenv("FLASHMOE_CUDA_KERNEL", "portable")
    assert explain(q, q, q).kernel is KernelKind.PORTABLE
    monkeypatch.setenv("FLASHMOE_CUDA_KERNEL", "none such")
    with pytest.raises(
        InputError, match=r"FLASHMOE_CUDA_KERNEL='none such' names no kernel; expected one of .*portable"
    ):
        explain(q, q, q)


def test_a_kernel_that_cannot_be_loaded_is_one_clear_line() -> None:
    wrong = configs.short("sm_75", 64)
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises((DeviceError, RuntimeError), match="bfloat16 needs m16n8k16"):
        forward(q, q, q, choice=Choice(KernelKind.PORTABLE, wrong))
