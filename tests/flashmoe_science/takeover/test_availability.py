"""What is asked of a machine before its kernels are taken."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.errors import CaptureError, DeviceError
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.takeover import availability


def test_gradients_of_experts_are_asked_for_by_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_z(*tensors: torch.Tensor, activation: Activation, w13_layout: W13Layout) -> bool:
        return (activation, w13_layout) == (Activation.SILU, W13Layout.CONCAT)

    monkeypatch.setattr(availability.cuda_training, "keeps_z", keeps_z)
    why = availability.why_no_expert_gradients
    assert why("cpu", torch.bfloat16, "gelu", "concat") is None
    # "meta" stands for a GPU.
    assert why("meta", torch.bfloat16, "silu", "concat") is None
    reason = "no kernel for the gradients of experts with {} on this GPU"
    assert why("meta", torch.bfloat16, "gelu", "concat") == reason.format("gelu")
    assert why("meta", torch.bfloat16, "silu", "interleaved") == reason.format("silu")


def test_what_a_capture_refuses_is_not_remembered() -> None:
    failures: dict[str, str] = {}
    assert (
        availability.failed(failures, "kind", CaptureError("not loaded; call")) == "CaptureError: not loaded"
    )
    assert not failures
    assert (
        availability.failed(failures, "kind", DeviceError("no NVRTC; install it")) == "DeviceError: no NVRTC"
    )
    assert failures == {"kind": "DeviceError: no NVRTC"}
