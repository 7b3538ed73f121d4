"""What PyTorch's own kernels need before one of them is captured."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import flashmoe_science
from flashmoe_science.takeover import capture

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _of_a_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_thread", capture._Thread())


class _Attention(TorchDispatchMode):
    """Counts calls with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.calls += "attention" in function.overloadpacket.__name__
        return function(*arguments, **(named or {}))


def _calls(dtype: torch.dtype = torch.bfloat16) -> int:
    with _Attention() as counted:
        capture.make_ready(CPU, dtype)
    return counted.calls


def test_a_thread_is_made_ready_once_for_a_device_and_dtype() -> None:
    assert (_calls(), _calls(), _calls(torch.float16), _calls(torch.float16)) == (1, 0, 1, 0)
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.extend((_calls(), _calls())))
    thread.start()
    thread.join()
    assert others == [1, 0]


def test_who_asks_for_flash_alone_has_no_kernel_for_masks() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert _calls() == 0
    assert _calls() == 1


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
