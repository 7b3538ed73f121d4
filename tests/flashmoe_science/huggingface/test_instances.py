"""What `accelerate` puts in the place of a module's `forward`, where others copy the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import MODELS

import flashmoe_science

pytest.importorskip("transformers", "5.8.1", reason="needs transformers 5.8.1")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def taken() -> list[Any]:
    """Routers, norms and layers of attention."""
    model = MODELS["qwen3_moe"].make()
    result = flashmoe_science.accelerate(model)
    assert result.routers
    assert result.norms
    assert result.rotations
    return [module for module in model.modules() if "forward" in vars(module)]


def test_a_replica_of_data_parallel_computes_with_its_own_weights(taken: list[Any]) -> None:
    """The Trainer's way to several GPUs: the original's weights are on another one."""
    assert {type(module).__name__.removeprefix("Qwen3Moe") for module in taken} == {
        "Attention",
        "RMSNorm",
        "TopKRouter",
    }
    for module in taken:
        replica = module._replicate_for_data_parallel()
        assert replica.forward.__self__ is replica
        assert module.forward.__self__ is module
    norm = next(module for module in taken if type(module).__name__.endswith("RMSNorm"))
    replica = norm._replicate_for_data_parallel()
    replica.weight = 3 * norm.weight.detach()  # no parameter: `replicate` gives it the copy on its device so
    rows = torch.randn(2, norm.weight.shape[0])
    torch.testing.assert_close(replica(rows), 3 * norm(rows))


def test_a_replica_of_a_replica_is_bound_to_itself(taken: list[Any]) -> None:
    replica = taken[0]._replicate_for_data_parallel()._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica


def test_norms_and_rotations_can_be_given_back() -> None:
    model = MODELS["qwen3"].make()
    flashmoe_science.accelerate(model)
    assert any("forward" in vars(module) for module in model.modules())
    result = flashmoe_science.accelerate(model, norms=False, rotations=False)
    assert not result.norms
    assert not result.rotations
    for module in model.modules():
        assert not [name for name in vars(module) if name == "forward" or name.startswith("_cudadent42")]


def test_a_hook_that_came_later_stays_and_calls_what_was_taken() -> None:
    """As accelerate's of Hugging Face, which bring what a module needs to its device."""
    model = MODELS["qwen3_moe"].make()
    first = flashmoe_science.accelerate(model)
    hooked = [module for module in model.modules() if "forward" in vars(module)]
    calls: list[str] = []

    def hook(module: Any) -> None:
        taken = module.forward

        def forward(*inputs: Any, **options: Any) -> Any:
            calls.append(type(module).__name__)
            return taken(*inputs, **options)

        module.forward = forward

    for module in hooked:
        hook(module)
    expected = MODELS["qwen3_moe"].call(model)
    assert {"Qwen3MoeAttention", "Qwen3MoeRMSNorm", "Qwen3MoeTopKRouter"} == set(calls)
    calls.clear()
    assert flashmoe_science.accelerate(model) == first
    assert flashmoe_science.accelerate(model, norms=False, rotations=False).routers == first.routers
    torch.testing.assert_close(MODELS["qwen3_moe"].call(model), expected, rtol=0, atol=1e-6)
    assert {"Qwen3MoeAttention", "Qwen3MoeRMSNorm", "Qwen3MoeTopKRouter"} == set(calls)
