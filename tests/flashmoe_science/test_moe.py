"""The public functions: what they take, what they refuse, and how they say so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_reference import assert_as_exact_as_torch, make_moe

from flashmoe_science import DeviceError, InputError, fused_moe, topk_routing

Arguments = dict[str, Any]


def arguments(**changes: Any) -> Arguments:
    """Of a call that is right: 6 tokens, hidden 32, intermediate 48, 4 experts, 2 chosen."""
    moe = make_moe(6, 32, 48, 4, 2)
    names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
    return {**dict(zip(names, moe.tensors, strict=True)), **changes}


def test_the_result_of_the_public_function() -> None:
    moe = make_moe(6, 32, 48, 4, 2, dtype=torch.bfloat16)
    assert_as_exact_as_torch(fused_moe(*moe.tensors), moe)


def test_routing_feeds_the_experts() -> None:
    moe = make_moe(6, 32, 48, 4, 2)
    weights, ids = topk_routing(torch.randn(6, 4), 2)
    assert fused_moe(*moe.tensors[:3], weights, ids).shape == (6, 32)


Change = Callable[[Arguments], Arguments]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a: {"hidden_states": a["hidden_states"].tolist()},
            "hidden_states is a list; expected a torch",
        ),
        (
            lambda a: {"hidden_states": a["hidden_states"][None]},
            r"hidden_states has 3 dim.*\(tokens, hidden\)",
        ),
        (lambda a: {"w13": a["w13"][0]}, r"w13 has 2 dimensions.*\(experts, 2 \* intermediate, hidden\)"),
        (lambda a: {"w2": a["w2"][:3].clone()}, "w13 has 4 experts but w2 has 3; expected the same"),
        (lambda a: {"w13": a["w13"][:, :, :16].clone()}, "hidden size 32 but w13 has 16"),
        (lambda a: {"w2": a["w2"][:, :16].clone()}, "hidden size 32 but w2 has 16"),
        (lambda a: {"w13": a["w13"][:, :48].clone()}, r"w13 has 48 rows.*expected 96, 2 \* intermediate"),
        (
            lambda a: {"activation": "relu2_no_mul"},
            "w13 has 96 rows.*expected 48, intermediate, for activation",
        ),
        (lambda a: {"hidden_states": a["hidden_states"].double()}, "float64; expected float32 or bfloat16"),
        (lambda a: {"w2": a["w2"].half()}, "w2 is torch.float16 but hidden_states is torch.float32"),
        (
            lambda a: {"topk_weights": a["topk_weights"].half()},
            "topk_weights has dtype torch.float16; .* float32",
        ),
        (
            lambda a: {"topk_ids": a["topk_ids"].short()},
            "topk_ids has dtype torch.int16; expected int32 or int64",
        ),
        (lambda a: {"topk_ids": a["topk_ids"][:, :1].clone()}, "differ in shape"),
        (
            lambda a: {"topk_ids": a["topk_ids"][:5], "topk_weights": a["topk_weights"][:5]},
            "hidden_states has 6 tokens but topk_ids has 5",
        ),
        (
            lambda a: {"topk_ids": a["topk_ids"][:, :0], "topk_weights": a["topk_weights"][:, :0]},
            "k is 0",
        ),
        (
            lambda a: {"w13": a["w13"].transpose(0, 1).contiguous().transpose(0, 1)},
            r"w13 is not contiguous .*call .contiguous\(\) on it, once, where the model is loaded",
        ),
        (lambda a: {"topk_ids": a["topk_ids"].t().contiguous().t()}, "topk_ids is not contiguous"),
        (
            lambda a: {"hidden_states": a["hidden_states"].t().contiguous().t()},
            "hidden_states is not contiguous",
        ),
        (lambda a: {"w13": a["w13"].to("meta")}, "w13 is on meta but hidden_states is on cpu"),
        (lambda a: {"w2": a["w2"].to_sparse()}, "w2 has layout torch.sparse_coo; expected a dense tensor"),
        (lambda a: {"activation": "swish"}, "activation is 'swish'; expected one of 'silu', 'gelu'"),
        (lambda a: {"activation": ["silu"]}, "activation is"),
        (lambda a: {"w13_layout": "split"}, "w13_layout is 'split'; expected one of 'concat', 'interleaved'"),
        (lambda a: {"out": torch.empty(6, 16)}, r"out is \(6, 16\) torch.float32; expected \(6, 32\)"),
        (lambda a: {"out": torch.empty(6, 32, dtype=torch.half)}, "out is .*torch.float16; expected"),
        (
            lambda a: {"out": torch.empty(32, 6).t()},
            r"out is not contiguous .*pass torch.empty_like\(hidden_states\)$",
        ),
        (
            lambda a: {"out": torch.empty(6, 32, device="meta")},
            r"out is on meta .*pass torch.empty_like\(hidden_states\)$",
        ),
        (
            lambda a: {"out": torch.empty(6, 32, requires_grad=True)},
            "autograd does not record a call with out=, and a tensor requires a gradient; leave out= away",
        ),
        (
            lambda a: {"w13": a["w13"][:0], "w2": a["w2"][:0]},
            "w13 and w2 have no experts, .* expected at least one",
        ),
        (lambda a: {"out": a["hidden_states"]}, "out shares memory with hidden_states"),
        (
            lambda a: {"w13": a["w13"].requires_grad_(), "out": torch.empty(6, 32)},
            "autograd does not record a call with out=, and a tensor requires a gradient; leave out= away",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(change: Change, message: str) -> None:
    good = arguments()
    bad = {**good, **change(good)}
    for _ in range(2):  # also where the same shapes have been seen before
        with pytest.raises(InputError, match=message) as raised:
            fused_moe(**bad)
        assert "\n" not in str(raised.value)
        with torch.no_grad():
            fused_moe(**good)


@pytest.mark.parametrize(("hidden", "intermediate"), [(24, 48), (32, 40)])
def test_sizes_are_multiples_of_16(hidden: int, intermediate: int) -> None:
    moe = make_moe(3, hidden, intermediate, 2, 1)
    with pytest.raises(InputError, match="expected a multiple of 16: pad the weights with zeros"):
        fused_moe(*moe.tensors)


def test_gradients_that_nobody_records_are_fine() -> None:
    changed = arguments()
    changed["w13"].requires_grad_()
    with torch.no_grad():
        assert not fused_moe(**changed).requires_grad


def test_a_device_without_kernel() -> None:
    tensors = [tensor.to("meta") for tensor in make_moe(3, 32, 32, 2, 1).tensors]
    with pytest.raises(DeviceError, match="no kernel for meta"):
        fused_moe(*tensors)
    with pytest.raises(DeviceError, match="no kernel for meta"):
        topk_routing(torch.empty(3, 4, device="meta"), 2)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_fake_tensors_give_fake_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        moe = [torch.empty(6, 32), torch.empty(4, 96, 32), torch.empty(4, 32, 48), torch.empty(6, 2)]
        ids = torch.empty(6, 2, dtype=torch.int32)
        assert fused_moe(*moe, ids).shape == (6, 32)
        weights, experts = topk_routing(torch.empty(3, 4), 2)
        assert weights.shape == experts.shape == (3, 2)
        assert isinstance(weights, FakeTensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 32), torch.randn(4, 32)])
    with pytest.raises(InputError, match="hidden_states is a nested tensor; expected a dense one"):
        fused_moe(**arguments(hidden_states=nested))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(3)}, r"logits has 1 dimensions.*expected 2, \(tokens, experts\)"),
        ({"logits": torch.zeros(3, 4, dtype=torch.int32)}, "logits has dtype torch.int32"),
        ({"logits": torch.zeros(4, 3).t()}, "logits is not contiguous"),
        ({"k": 5}, "k is 5 but logits has 4 experts; expected 1 to 4"),
        ({"k": 0}, "k is 0"),
        ({"k": 2.0}, "k is 2.0; expected a whole number"),
        ({"k": True}, "k is True; expected a whole number"),
        ({"scores": "softplus"}, "scores is 'softplus'; expected one of 'softmax', 'sigmoid'"),
        ({"correction_bias": torch.zeros(3)}, "correction_bias has 3 entries but logits has 4 experts"),
        (
            {"correction_bias": torch.zeros(4).half()},
            "correction_bias has dtype torch.float16; expected float32",
        ),
        (
            {"correction_bias": torch.zeros(4, device="meta")},
            "correction_bias is on meta but logits is on cpu",
        ),
        ({"scaling_factor": float("inf")}, "scaling_factor is inf; expected a finite number"),
        ({"scaling_factor": 10**400}, "scaling_factor is 1000.*; expected a finite number"),
        ({"scaling_factor": "1"}, "scaling_factor is '1'; expected a finite number"),
        (
            {"scaling_factor": -1e39},
            r"scaling_factor is -1e\+39; expected a finite number that float32 holds",
        ),
        ({"renormalize": "no"}, "renormalize is 'no'; expected True or False"),
        ({"logits": torch.zeros(3, 0)}, "logits has no experts"),
    ],
)
def test_bad_routing_arguments_are_refused(changes: Arguments, message: str) -> None:
    with pytest.raises(InputError, match=message):
        topk_routing(**{"logits": torch.zeros(3, 4), "k": 2, **changes})


def test_the_package_imports_without_torch() -> None:
    code = (
        "import flashmoe_science, sys; print('torch' in sys.modules, 'fused_moe' in flashmoe_science.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False True"
