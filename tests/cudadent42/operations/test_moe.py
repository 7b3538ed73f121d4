"""The mixture of experts in the lab: cases, inputs, what is right, and that wrong results are told from right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cudadent42.correctness.truth import find_truth, judge
from cudadent42.model.implementations import UnsupportedCaseError, why_not
from cudadent42.model.records import Plan
from cudadent42.operations import numerics
from cudadent42.operations.moe import OPERATION
from cudadent42.operations.moe.activations import ACTIVATIONS, W13_LAYOUTS
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe.hard_inputs import hard_cases, hard_inputs
from cudadent42.operations.moe.implementations import _prepare_liger
from cudadent42.operations.moe.inputs import MoeInputs, input_sets, random_inputs
from cudadent42.operations.moe.reference import activate, expert_loop, moe_float64, yardstick
from cudadent42.registry import get, load, registry
from cudadent42.stages.verify import units, verify

DTYPES = ["fp16", "bf16", "fp32"]
CASE = MoeCase("c", "bf16", 24, hidden=64, intermediate=48, experts=8, top_k=2)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Small problems on a busy machine lose far more to waiting for each other's threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_what_follows_from_a_case() -> None:
    case = MoeCase("c", "bf16", 32768, 2048, 768, 128, 8)
    assert case.id == "c/bf16"
    assert case.operation == "moe"
    assert case.flops == 6 * 32768 * 8 * 2048 * 768
    assert case.experts_touched == 128
    weights = 128 * 3 * 2048 * 768 * 2
    tokens = 32768 * (2 * 2048 * 2 + 8 * 8)
    assert case.bytes_min == weights + tokens
    assert case.memory_bytes(3) == weights + 3 * tokens
    assert replace(case, tokens=1).experts_touched == 8
    assert 78 <= replace(case, tokens=16).experts_touched <= 84
    assert replace(case, activation="relu2_no_mul").flops == 4 * 32768 * 8 * 2048 * 768


def test_input_sets_share_the_experts_and_nothing_else() -> None:
    first, second = input_sets(CASE, 1, 2, "cpu")
    assert first.w13.data_ptr() == second.w13.data_ptr()
    assert first.w2.data_ptr() == second.w2.data_ptr()
    assert not torch.equal(first.hidden_states, second.hidden_states)
    assert not torch.equal(first.topk_ids, second.topk_ids)


def test_inputs_are_reproducible() -> None:
    first, again, other = (random_inputs(CASE, seed, "cpu") for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, again.tensors, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.tensors, other.tensors, strict=True))


def test_routing_is_of_different_experts_and_skewed() -> None:
    inputs = random_inputs(replace(CASE, tokens=2000, experts=64, top_k=4), 0, "cpu")
    assert (inputs.topk_ids.sort(dim=-1).values.diff(dim=-1) > 0).all()
    torch.testing.assert_close(inputs.topk_weights.sum(dim=-1), torch.ones(2000))
    load_of = torch.bincount(inputs.topk_ids.flatten(), minlength=64) / (2000 * 4 / 64)
    assert 1.5 < float(load_of.max()) < 5
    assert float(load_of.min()) < 0.7


def by_formula(inputs: MoeInputs, activation: str) -> Tensor:
    """Every expert on every token, then the chosen ones: nothing like the reference's way."""
    x, w13, w2 = (tensor.double() for tensor in inputs.tensors[:3])
    between = activate(torch.einsum("th,erh->etr", x, w13), activation)
    every = torch.einsum("eti,ehi->eth", between, w2)
    weight = torch.zeros(x.shape[0], len(w13), dtype=torch.float64)
    weight.scatter_add_(1, inputs.topk_ids.long(), inputs.topk_weights.double())
    return torch.einsum("te,eth->th", weight, every)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [0, 1, 24])
def test_reference_equals_the_formula(activation: str, tokens: int) -> None:
    inputs = random_inputs(replace(CASE, tokens=tokens, activation=activation), 3, "cpu")
    chunks: list[None] = []
    exact = moe_float64(inputs, activation, lambda: chunks.append(None))
    torch.testing.assert_close(exact, by_formula(inputs, activation), rtol=1e-12, atol=1e-12)
    assert bool(chunks) == bool(tokens)


BIASED = replace(CASE, activation="swigluoai", bias=True, w13_layout="interleaved")
"""As GPT-OSS has its layers."""


@pytest.mark.parametrize("name", ["grouped_mm", "expert_loop", "cudadent42", "grouped_mm_compiled"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", W13_LAYOUTS)
def test_biases_and_layouts_are_right(
    name: str, bias: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    # The loop rounds every step of a choice to the dtype, so it is held to float32.
    dtype = "fp32" if name == "expert_loop" else "bf16"
    case = replace(BIASED, bias=bias, w13_layout=layout, dtype=dtype)
    truth = find_truth(case, random_inputs(case, 2, "cpu"))
    verdict = judge(truth, name, get(name, "moe").prepare(case, truth.inputs)(), "random")
    assert verdict.passed, verdict.detail


def test_the_layer_with_biases_by_turns_is_the_formula() -> None:
    inputs = random_inputs(replace(BIASED, top_k=8), 4, "cpu")
    assert inputs.biases is not None
    x, w13, w2 = (tensor.double() for tensor in inputs.tensors[:3])
    first, second = (bias.double() for bias in inputs.biases)
    projected = torch.einsum("th,erh->etr", x, w13) + first[:, None]
    gate, up = projected[..., ::2].clamp(max=7), projected[..., 1::2].clamp(-7, 7)
    between = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    every = torch.einsum("eti,ehi->eth", between, w2) + second[:, None]
    weight = torch.zeros(x.shape[0], len(w13), dtype=torch.float64)
    weight.scatter_add_(1, inputs.topk_ids.long(), inputs.topk_weights.double())
    expected = torch.einsum("te,eth->th", weight, every)
    torch.testing.assert_close(moe_float64(inputs, "swigluoai"), expected, rtol=1e-12, atol=1e-12)


def _without_first(inputs: MoeInputs) -> MoeInputs:
    first, second = inputs.biases or ()
    return replace(inputs, biases=(torch.zeros_like(first), second))


def _without_second(inputs: MoeInputs) -> MoeInputs:
    first, second = inputs.biases or ()
    return replace(inputs, biases=(first, torch.zeros_like(second)))


def _of_the_next_expert(inputs: MoeInputs) -> MoeInputs:
    first, second = inputs.biases or ()
    return replace(inputs, biases=(first.roll(1, 0), second.roll(1, 0)))


def _as_if_concatenated(inputs: MoeInputs) -> MoeInputs:
    return replace(inputs, w13_layout="concat")


@pytest.mark.parametrize(
    "damage", [_without_first, _without_second, _of_the_next_expert, _as_if_concatenated]
)
def test_biases_left_out_or_at_another_place_are_seen(damage: Callable[[MoeInputs], MoeInputs]) -> None:
    truth = find_truth(BIASED, random_inputs(BIASED, 1, "cpu"))
    result = moe_float64(damage(truth.inputs), BIASED.activation).to(torch.bfloat16)  # type: ignore[arg-type]
    assert not judge(truth, "damaged", result, "random").passed


def test_a_case_with_biases_says_so_and_counts_them() -> None:
    assert OPERATION.shape(BIASED) == "24 × 64 × 48, 2 of 8 swigluoai interleaved biases"
    assert BIASED.memory_bytes(1) - replace(BIASED, bias=False).memory_bytes(1) == 2 * 8 * (2 * 48 + 64)
    assert torch.equal(
        random_inputs(BIASED, 1, "cpu").w13, random_inputs(replace(BIASED, bias=False), 1, "cpu").w13
    )


def test_liger_takes_no_biases() -> None:
    with pytest.raises(UnsupportedCaseError, match="knows no biases"):
        _prepare_liger(replace(CASE, bias=True), random_inputs(CASE, 0, "cpu"))


@pytest.mark.parametrize("name", ["grouped_mm", "expert_loop", "cudadent42"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_implementations_are_right(name: str, dtype: str) -> None:
    case = replace(CASE, dtype=dtype)
    truth = find_truth(case, random_inputs(case, 2, "cpu"))
    verdict = judge(truth, name, get(name, "moe").prepare(case, truth.inputs)(), "random")
    assert verdict.passed, verdict.detail


def test_compiled_composition_is_the_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic: function
    )  # a compiler takes half a minute
    inputs = random_inputs(CASE, 2, "cpu")
    compiled = get("grouped_mm_compiled", "moe").prepare(CASE, inputs)()
    assert torch.equal(compiled, get("grouped_mm", "moe").prepare(CASE, inputs)())


def test_peers_say_why_they_are_not_here() -> None:
    reason = why_not(get("liger", "moe"), "cpu")
    assert reason == "liger runs on cuda, not on cpu"
    theirs = {"grouped_mm", "grouped_mm_compiled", "expert_loop", "liger"}
    assert theirs | {"cudadent42", "cudadent42_16bit"} == set(registry("moe"))
    assert all(item.operation == "moe" for item in registry("moe").values())


# ---------------------------------------------------------------- adversarial inputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_pass_every_hard_input(dtype: str) -> None:
    """The exact result rounded, and this project's."""
    ours = get("cudadent42", "moe")
    kinds = [hard.kind for hard in hard_inputs(dtype)]
    assert len(set(kinds)) == len(kinds)
    for hard in hard_inputs(dtype):
        inputs = hard.make(3, "cpu")
        truth = find_truth(hard.case, inputs)
        exact = truth.reference.to(inputs.result_like.dtype)
        for name, result in (("exact", exact), ("ours", ours.prepare(hard.case, inputs)())):
            verdict = judge(truth, name, result, hard.kind)
            assert verdict.passed, f"{name}, {hard.kind}: {verdict.detail}"


def test_hard_inputs_are_what_they_say() -> None:
    made = {hard.kind: hard.make(0, "cpu") for hard in hard_inputs("bf16")}
    assert all(isinstance(inputs, MoeInputs) for inputs in made.values())
    exact = {kind: moe_float64(inputs, "silu") for kind, inputs in made.items() if "no_mul" not in kind}  # type: ignore[arg-type]
    assert exact["no_valid_id"].abs().max() == 0
    assert exact["ids_out_of_range"][0].abs().max() == 0
    assert exact["no_tokens"].shape == (0, 64)
    assert exact["nan_idle_expert"].isfinite().all()
    for kind in ("nan_token_many", "nan_weight_many"):
        assert exact[kind].isnan().any(dim=-1).sum() == 1
    assert 0 < exact["nan_expert_many"].isnan().sum() < 577
    counts = torch.bincount(made["uneven_rows"].topk_ids.flatten())  # type: ignore[attr-defined]
    assert {0, 1, 63, 64, 65, 127, 128, 129} <= set(counts.tolist())
    assert made["ids_int64"].topk_ids.dtype == torch.int64  # type: ignore[attr-defined]
    assert made["large_values_many"].hidden_states.abs().max() > 60  # type: ignore[attr-defined]


def test_hard_values_at_the_smallest_and_the_largest_shape_in_reach() -> None:
    cases = [replace(CASE, name=f"c{tokens}", tokens=tokens) for tokens in (4096, 1, 16, 10**6)]
    chunks = {hard.case.name.partition("@")[2] for hard in hard_cases(cases, "cpu")}
    assert chunks == {"c1", "c4096"}
    assert {hard.case.dtype for hard in hard_cases([CASE, replace(CASE, dtype="fp32")], "cpu")} == {
        "bf16",
        "fp32",
    }


# ---------------------------------------------------------------- wrong results

Damage = Callable[[MoeInputs], Tensor]


def _scaled(inputs: MoeInputs) -> Tensor:
    return moe_float64(inputs, "silu") * 1.01


def _last_choice_dropped(inputs: MoeInputs) -> Tensor:
    ids = inputs.topk_ids.clone()
    ids[-1, -1] = -1
    return moe_float64(replace(inputs, topk_ids=ids), "silu")


def _gate_and_up_swapped(inputs: MoeInputs) -> Tensor:
    gate, up = inputs.w13.chunk(2, dim=1)
    return moe_float64(replace(inputs, w13=torch.cat((up, gate), dim=1)), "silu")


def _one_weight_swapped(inputs: MoeInputs) -> Tensor:
    weights = inputs.topk_weights.clone()
    weights[5] = weights[5].flip(0)
    return moe_float64(replace(inputs, topk_weights=weights), "silu")


def _rows_rotated(inputs: MoeInputs) -> Tensor:
    return moe_float64(inputs, "silu").roll(1, 0)


def _weights_rounded_twice(inputs: MoeInputs) -> Tensor:
    coarse = inputs.w2.float().mul(2**-4).to(torch.float8_e4m3fn).to(inputs.w2.dtype) * 2**4
    return moe_float64(replace(inputs, w2=coarse), "silu")


@pytest.mark.parametrize(
    "damage",
    [
        _scaled,
        _last_choice_dropped,
        _gate_and_up_swapped,
        _one_weight_swapped,
        _rows_rotated,
        _weights_rounded_twice,
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_results_fail(damage: Damage, dtype: str) -> None:
    case = replace(CASE, dtype=dtype, tokens=200)
    truth = find_truth(case, random_inputs(case, 1, "cpu"))
    result = damage(truth.inputs).to(truth.inputs.result_like.dtype)  # type: ignore[arg-type]
    assert not judge(truth, "damaged", result, "random").passed


WRAPPED = {
    "ids_out_of_range": lambda x: replace(x, topk_ids=x.topk_ids.clamp(0, x.w13.shape[0] - 1)),
    "ids_int64": lambda x: replace(x, topk_ids=x.topk_ids & 0xFFFFFFFF),
    "same_expert_twice": lambda x: replace(x, topk_weights=x.topk_weights * torch.tensor([1.0, 0.0])),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_what_hard_inputs_are_for(kind: str) -> None:
    """Ids clamped or cut to 32 bits, and a repeated expert counted once."""
    hard = {each.kind: each for each in hard_inputs("bf16")}[kind]
    inputs = hard.make(1, "cpu")
    truth = find_truth(hard.case, inputs)
    wrong = yardstick(WRAPPED[kind](inputs), "silu")
    assert not judge(truth, "wrong", wrong, kind).passed


# ---------------------------------------------------------------- through the stage

PLUG_INS = """
import torch
from torch.nn import functional

def experts(hidden_states, w13, w2, topk_weights, topk_ids, *, activation):
    assert activation == "silu" or True
    from cudadent42.operations.moe.reference import expert_loop
    return expert_loop(hidden_states.float(), w13.float(), w2.float(), topk_weights, topk_ids, activation).to(w2.dtype)

def sorts_in_place(hidden_states, w13, w2, topk_weights, topk_ids, *, activation):
    result = experts(hidden_states, w13, w2, topk_weights, topk_ids, activation=activation)
    topk_ids.copy_(topk_ids.sort(dim=-1).values)
    return result

def silu_only(hidden_states, w13, w2, topk_weights, topk_ids, *, activation):
    if activation != "silu":
        raise NotImplementedError("SwiGLU only")
    return experts(hidden_states, w13, w2, topk_weights, topk_ids, activation=activation)
"""


@pytest.fixture
def plug_in(tmp_path: Path) -> Callable[[str], str]:
    path = tmp_path / "kernels.py"
    path.write_text(PLUG_INS)
    return lambda name: f"{path}:{name}"


def plan(*names: str) -> Plan:
    return Plan("test", "cpu", (CASE,), "expert_loop", ("expert_loop", *names), 8, 1, seed=5)


def test_a_plug_in_is_verified_like_our_own(plug_in: Callable[[str], str]) -> None:
    name = plug_in("experts")
    report = verify(plan(name), emit=lambda event: None)
    assert report.passed, [case.detail for case in report.cases if not case.passed]
    assert sum(case.implementation == name for case in report.cases) == len(
        [unit for unit in units(plan(name)) if unit.implementation == name]
    )


def test_a_plug_in_without_biases_declines_cases_that_have_them(plug_in: Callable[[str], str]) -> None:
    name = plug_in("experts")
    report = verify(replace(plan(name), cases=(BIASED,)), emit=lambda event: None)
    assert {why for key, why in report.skipped.items() if "experts" in str(key)} == {
        "it has no argument w13_bias, which this case needs"
    }


def test_a_plug_in_gets_biases_and_the_layout(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("def f(*arguments, **options): return sorted(options)\n")
    call = load(f"{tmp_path}/k.py:f", "moe").prepare(BIASED, random_inputs(BIASED, 0, "cpu"))
    assert call() == ["activation", "w13_bias", "w13_layout", "w2_bias"]


def test_a_plug_in_that_changes_its_inputs_fails(plug_in: Callable[[str], str]) -> None:
    report = verify(plan(plug_in("sorts_in_place")), emit=lambda event: None)
    assert "changed its inputs" in {case.detail for case in report.cases if not case.passed}


def test_a_plug_in_may_decline(plug_in: Callable[[str], str]) -> None:
    report = verify(plan(plug_in("silu_only")), emit=lambda event: None)
    assert report.passed
    assert set(report.skipped.values()) == {"SwiGLU only"}


def test_only_what_the_cases_can_lead_to_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoe_science.cuda.wgmma.nvrtc_version", lambda: (13, 0))
    kernels = OPERATION.cuda_kernels(["sm_90a"])
    needed = OPERATION.needed(kernels, [CASE])
    assert 0 < len(needed) < len(kernels) / 2
    assert all(kernel.macros.get("ELEMENT_BF16", 1) == 1 for kernel in needed)
    assert all(kernel.macros.get("ACTIVATION", 0) in (0, 1) for kernel in needed)
    assert "topk_routing" not in {kernel.function for kernel in needed}
    assert OPERATION.needed(kernels, [replace(CASE, dtype="fp32")]) == []


def test_a_plug_in_of_the_wrong_operation_gets_other_arguments(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("def f(*arguments, **options): return len(arguments), sorted(options)\n")
    implementation = load(f"{tmp_path}/k.py:f", "moe")
    assert implementation.operation == "moe"
    assert implementation.prepare(CASE, random_inputs(CASE, 0, "cpu"))() == (5, ["activation"])


def test_poison_covers_what_lies_between_the_products() -> None:
    [inputs] = numerics(CASE).input_sets(CASE, 0, 1, "cpu")
    assert inputs.buffer_shapes == ((24, 64), (48, 48), (48, 64))


def test_loop_and_yardstick_skip_ids_that_are_no_experts() -> None:
    inputs = random_inputs(CASE, 0, "cpu")
    inputs.topk_ids[3] = -1
    assert expert_loop(*inputs.tensors, "silu")[3].abs().max() == 0
    assert yardstick(inputs, "silu")[3].abs().max() == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_have_the_names_of_the_kernels(activation: str) -> None:
    from flashmoe_science.moe_arguments import Activation

    assert Activation(activation).gated == replace(CASE, activation=activation).gated
    assert len(ACTIVATIONS) == len(Activation)
    gate = torch.linspace(-3, 3, 8)
    values = torch.cat((gate, torch.ones(8))) if Activation(activation).gated else gate
    expected = {
        "silu": functional.silu(gate),
        "gelu": functional.gelu(gate),
        "gelu_tanh": functional.gelu(gate, approximate="tanh"),
        "relu2": functional.relu(gate) ** 2,
        "swigluoai": 2 * gate * torch.sigmoid(1.702 * gate),
    }[activation.removesuffix("_no_mul")]
    torch.testing.assert_close(activate(values, activation), expected)
