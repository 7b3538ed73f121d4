"""What is asked of a machine before its kernels are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmoe_science.moe_arguments import Activation
from flashmoe_science.takeover import availability


def test_gradients_of_experts_are_asked_for_by_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_z(*tensors: torch.Tensor, activation: Activation, **options: Any) -> bool:
        return activation is Activation.SILU

    monkeypatch.setattr(availability.cuda_training, "keeps_z", keeps_z)
    why = availability.why_no_expert_gradients
    assert why("cpu", torch.bfloat16, "gelu") is None
    # "meta" stands for a GPU.
    assert why("meta", torch.bfloat16, "silu") is None
    assert (
        why("meta", torch.bfloat16, "gelu") == "no kernel for the gradients of experts with gelu on this GPU"
    )
