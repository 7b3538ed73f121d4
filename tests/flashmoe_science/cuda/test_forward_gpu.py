"""The CUDA backend on a GPU: results against float64; streams, threads and graphs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import flashmoe_science
from flashmoe_science.configs import portable as configs
from flashmoe_science.cuda import Choice, KernelKind, explain, forward
from flashmoe_science.errors import DeviceError, InputError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# The length pairs of FlashAttention's tests, and empty ones.
PAIRS = [
    *[
        (1, 1),
        (3, 3),
        (64, 32),
        (64, 128),
        (128, 192),
        (256, 256),
        (255, 256),
        (239, 1),
        (799, 3),
        (113, 203),
    ],
    *[(113, 128), (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256)],
    *[(1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048), (64, 0), (0, 64), (5, 0)],
]


def inside_nan(*shape: int, dtype: torch.dtype, rows_first: bool = False) -> torch.Tensor:
    """Normal random numbers, with rows and columns of NaN around them in memory."""
    batch, heads, rows, dim = shape
    if rows_first:
        whole = torch.full((batch, rows + 16, heads, dim + 8), math.nan, device="cuda", dtype=dtype)
        view = whole[:, 8 : 8 + rows, :, :dim].transpose(1, 2)
    else:
        whole = torch.full((batch, heads, rows + 16, dim + 8), math.nan, device="cuda", dtype=dtype)
        view = whole[:, :, 8 : 8 + rows, :dim]
    return view.copy_(torch.randn(shape, device="cuda"))


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition in `dtype`; output and log-sum-exp."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ (k * scale).transpose(2, 3)
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2]), -math.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0) @ v, scores.logsumexp(dim=-1)


def assert_close(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    choice: Choice | None = None,
) -> None:
    """Error against float64 within twice that of PyTorch's operators in the same dtype, and a rounding."""
    out, lse = forward(q, k, v, causal=causal, softmax_scale=scale, return_lse=True, choice=choice)
    assert out.shape == q.shape
    assert lse is not None
    if out.numel() == 0:
        return
    used = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    exact, exact_lse = reference(q, k, v, causal, used, torch.float64)
    plain, _ = reference(q, k, v, causal, used, q.dtype)
    rounding = 2 * ((exact.to(q.dtype) + 0.3 - 0.3).double() - exact).abs().max().item()
    error = (out.double() - exact).abs().max().item()
    assert error <= 2 * (plain.double() - exact).abs().max().item() + rounding
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), PAIRS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(seqlen_q: int, seqlen_k: int, head_dim: int, causal: bool) -> None:
    torch.manual_seed(seqlen_q + seqlen_k)
    q = inside_nan(2, 6, seqlen_q, head_dim, dtype=torch.bfloat16)
    k, v = (inside_nan(2, 2, seqlen_k, head_dim, dtype=torch.bfloat16) for _ in range(2))
    assert_close(q, k, v, causal=causal)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dims_and_layouts(head_dim: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        q = inside_nan(2, 4, 150, head_dim, dtype=dtype, rows_first=True)
        k, v = (inside_nan(2, 2, 170, head_dim, dtype=dtype) for _ in range(2))
        assert_close(q, k, v, causal=head_dim % 16 == 0)


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_grouped_heads(kv_heads: int) -> None:
    q = inside_nan(3, 6, 300, 64, dtype=torch.float16)
    k, v = (inside_nan(3, kv_heads, 333, 64, dtype=torch.float16, rows_first=True) for _ in range(2))
    assert_close(q, k, v, causal=True)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-6, 1.0])
def test_softmax_scales(scale: float) -> None:
    q, k, v = (inside_nan(1, 2, 200, 64, dtype=torch.bfloat16) for _ in range(3))
    assert_close(q, k, v, causal=True, scale=scale)


@pytest.mark.parametrize("kind", ["large", "rising", "falling", "dominant", "constant"])
def test_adversarial_scores(kind: str) -> None:
    q, k, v = (torch.randn(1, 2, 500, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ramp = torch.linspace(0, 30, 500, device="cuda")[:, None]
    if kind == "large":
        q = q * 30
    elif kind in ("rising", "falling"):  # the row maximum moves in every block
        q = torch.ones_like(q)
        k = (ramp if kind == "rising" else ramp.flip(0)).expand(500, 64).to(q.dtype).expand_as(q).contiguous()
    elif kind == "dominant":  # one key outweighs all others, at a tile's edge
        k[:, :, 63:65] *= 40
    else:
        k = torch.ones_like(k)
    assert_close(q, k, v, causal=False)
    assert_close(q, k, v, causal=True)


@pytest.mark.parametrize("architecture", configs.tuned_architectures())
@pytest.mark.parametrize("head_dim", configs.HEAD_DIMS)
def test_every_architectures_tiles_on_this_gpu(architecture: str, head_dim: int) -> None:
    for tile in (configs.tall, configs.short):
        choice = Choice(KernelKind.PORTABLE, tile(architecture, head_dim))
        dtype = torch.float16 if architecture == "sm_75" else torch.bfloat16
        q = inside_nan(2, 4, 301, head_dim, dtype=dtype)
        k, v = (inside_nan(2, 2, 257, head_dim, dtype=dtype) for _ in range(2))
        for causal in (False, True):
            assert_close(q, k, v, causal=causal, choice=choice)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    q, k, v = (torch.randn(1, 1, 100, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    clean, _ = forward(q, k, v)
    q[0, 0, 17] = math.nan
    out, lse = forward(q, k, v, return_lse=True)
    assert out[0, 0, 17].isnan().all()
    assert lse is not None
    assert lse[0, 0, 17].isnan()
    others = torch.arange(100, device="cuda") != 17
    assert torch.equal(out[0, 0, others], clean[0, 0, others])


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (128, True)])
def test_a_thousand_times_the_same_bits(head_dim: int, causal: bool) -> None:
    q, k, v = (torch.randn(1, 4, 2000, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first, _ = forward(q, k, v, causal=causal)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        different += (forward(q, k, v, causal=causal)[0] != first).sum()
    assert different.item() == 0


def test_heads_do_not_depend_on_their_neighbours() -> None:
    q, k, v = (torch.randn(3, 4, 333, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    whole, _ = forward(q, k, v, causal=True)
    for batch in range(3):
        alone, _ = forward(*(x[batch : batch + 1, 2:3] for x in (q, k, v)), causal=True)
        torch.testing.assert_close(alone[0, 0], whole[batch, 2], atol=2e-3, rtol=0)


def test_the_output_has_the_querys_layout() -> None:
    q = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.float16).transpose(1, 2)
    out, _ = forward(q, q, q)
    assert out.stride() == q.stride()


def test_a_graph_replays_on_new_data() -> None:
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    forward(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = forward(q, k, v, causal=True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    expected, _ = forward(q, k, v, causal=True)
    assert torch.equal(out, expected)


_CAPTURE_FIRST = """
import torch
from flashmoe_science.cuda import forward
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


def test_streams_and_threads() -> None:
    inputs = [
        tuple(torch.randn(1, 4, 700 + 64 * i, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for i in range(4)
    ]
    expected = [forward(*tensors, causal=True)[0] for tensors in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(100):
                out, _ = forward(*inputs[i], causal=True)
                if not torch.equal(out, expected[i]):
                    wrong.append(i)
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_is_the_tensors() -> None:
    q = torch.randn(1, 4, 200, 64, device="cuda:1", dtype=torch.bfloat16)
    out, _ = forward(q, q, q)
    assert out.device == q.device
    assert torch.cuda.current_device() == 0
    expected, _ = forward(q.to("cuda:0"), q.to("cuda:0"), q.to("cuda:0"))
    assert torch.equal(out.to("cuda:0"), expected)


def test_only_the_output_is_allocated() -> None:
    q, k, v = (torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    forward(q, k, v)
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
        InputError, match=r"FLASHMOE_CUDA_KERNEL='none such' names no kernel; known are .*portable"
    ):
        explain(q, q, q)


def test_a_kernel_that_cannot_be_loaded_is_one_clear_line() -> None:
    wrong = configs.tall("sm_75", 64)
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises((DeviceError, RuntimeError), match="bfloat16 needs m16n8k16"):
        forward(q, q, q, choice=Choice(KernelKind.PORTABLE, wrong))
