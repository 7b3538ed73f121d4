"""What PyTorch's own kernels need before one of them is captured."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import flashmoe_science
from flashmoe_science.takeover import capture

CPU = torch.device("cpu")
_BACKENDS = (
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
)


@pytest.fixture(autouse=True)
def _of_a_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_thread", capture._Thread())


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Of PyTorch's own function, which computes them."""
    made: list[torch.dtype] = []
    function = torch._C._nn.scaled_dot_product_attention

    def counted(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        made.append(query.dtype)
        return function(query, *arguments)

    monkeypatch.setattr(torch._C._nn, "scaled_dot_product_attention", counted)
    return made


def test_a_thread_is_made_ready_once_for_a_device_and_dtype(calls: list[torch.dtype]) -> None:
    def both_twice() -> None:
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16):
            capture.make_ready(CPU, dtype)

    both_twice()
    assert calls == [torch.bfloat16, torch.float16]
    thread = threading.Thread(target=both_twice)
    thread.start()
    thread.join()
    assert calls == [torch.bfloat16, torch.float16] * 2


def test_who_asks_for_flash_alone_has_no_kernel_for_masks(calls: list[torch.dtype]) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        capture.make_ready(CPU, torch.bfloat16)
    assert calls == []
    capture.make_ready(CPU, torch.bfloat16)
    assert len(calls) == 1


def test_a_library_that_was_not_allowed_before_is_made_ready_too(calls: list[torch.dtype]) -> None:
    """Under sdpa_kernel(MATH) cuDNN is not asked for, and has no handle yet."""
    for count, backends in enumerate(
        ([SDPBackend.MATH], [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION], list(_BACKENDS)), 1
    ):
        for _ in range(2):
            with sdpa_kernel(backends):
                capture.make_ready(CPU, torch.bfloat16)
        assert len(calls) == count


def test_no_mode_sees_the_call(calls: list[torch.dtype]) -> None:
    """A counter would count it, and selective checkpointing give its output to another call."""
    with FlopCounterMode(display=False) as counter:
        capture.make_ready(CPU, torch.bfloat16)
    assert counter.get_total_flops() == 0
    assert calls == []
    capture.make_ready(CPU, torch.bfloat16)
    assert len(calls) == 1


def test_what_pytorch_cannot_do_is_no_error_of_a_call_that_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def refuse(*arguments: Any) -> None:
        tried.append(arguments)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch._C._nn, "scaled_dot_product_attention", refuse)
    for _ in range(2):
        capture.make_ready(CPU, torch.bfloat16)
    assert len(tried) == 1


def test_nothing_is_called_within_a_capture(
    monkeypatch: pytest.MonkeyPatch, calls: list[torch.dtype]
) -> None:
    """A mask of the CPU is read there too."""
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: torch.empty(shape, dtype=dtype))
    capture.make_ready(torch.device("cuda", 0), torch.bfloat16)
    assert calls == []
    capturing = False
    capture.make_ready(torch.device("cuda", 0), torch.bfloat16)
    assert len(calls) == 1


@pytest.mark.gpu
def test_a_mask_that_was_read_may_be_captured_in_a_process_that_never_called_pytorchs() -> None:
    query, key, value = (torch.randn(2, 4, 256, 64, device="cuda").bfloat16() for _ in range(3))
    mask = torch.zeros(2, 1, 1, 256, dtype=torch.bool, device="cuda")
    mask[..., :7] = True
    caught: list[torch.Tensor] = []

    def capture_in_a_thread() -> None:
        """Whose handles nobody has made."""
        graph = torch.cuda.CUDAGraph()
        with flashmoe_science.sdpa(), torch.no_grad():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mask[..., :100] = True
        graph.replay()
        torch.cuda.synchronize()
        caught.append(output)

    thread = threading.Thread(target=capture_in_a_thread)
    thread.start()
    thread.join()
    weights = (query.double() @ key.double().mT / 8).masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(caught[0].double(), weights @ value.double(), rtol=0, atol=2e-2)
