"""Implementations whose names say in brackets which kernel is meant and how it is configured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import instruction_sets
from cudadent42.base.errors import UsageError
from cudadent42.commands.common import split
from cudadent42.model.cases import Case
from cudadent42.model.implementations import (
    NOT_DONE,
    UnsupportedCaseError,
    is_ours,
    named,
    split_variant,
    why_not,
)
from cudadent42.model.records import Plan
from cudadent42.operations import definition, variants
from cudadent42.operations.attention import implementations as attention
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.inputs import AttentionInputs, random_inputs
from cudadent42.operations.attention_backward import implementations as attention_backward
from cudadent42.operations.attention_backward.case import AttentionBackwardCase, AttentionTrainingStepCase
from cudadent42.operations.attention_backward.inputs import BackwardInputs
from cudadent42.operations.moe import implementations as moe
from cudadent42.operations.moe.case import MoeCase
from cudadent42.operations.moe.inputs import MoeInputs
from cudadent42.operations.variants import Variant, compiled, settable
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import get, registry
from cudadent42.stages.build import build
from cudadent42.stages.verify import verify
from flashmoe_science.configs.moe.few import FewWay
from flashmoe_science.cuda import attention as cuda_attention
from flashmoe_science.cuda import moe as cuda_moe
from flashmoe_science.cuda.attention import KernelKind, Problem, small
from flashmoe_science.cuda.attention.forward import asked
from flashmoe_science.cuda.attention.gradients.select import BACKWARD
from flashmoe_science.cuda.attention.select import FORWARD
from flashmoe_science.cuda.choice import Choice, KernelModule, Selection
from flashmoe_science.cuda.moe.forward import asked as moe_asked
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem
from flashmoe_science.cuda.moe.select import FORWARD as MOE
from flashmoe_science.errors import InputError, KernelDefectError
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.tuned.configuration import changed
from problems import H200


def problem_of(batch: int = 4, seqlen: int = 4096, head_dim: int = 128, causal: bool = False) -> Problem:
    like = torch.empty(batch, 16, seqlen, head_dim, dtype=torch.bfloat16, device="meta")
    return asked(like, like, like, causal, None, False, H200)[0]


def chosen(name: str, problem: Problem) -> Choice:
    variant = attention.variants_of().parse(name)
    return attention.variant_choice(variant, problem, H200)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("cudadent42", ("cudadent42", None)),
        ("cudadent42[avx2]", ("cudadent42", "avx2")),
        ("cudadent42[portable,block_n=48]", ("cudadent42", "portable,block_n=48")),
        ("cudadent42[portable", ("cudadent42[portable", None)),
        ("cudadent42]", ("cudadent42]", None)),
    ],
)
def test_what_stands_in_brackets(name: str, parts: tuple[str, str | None]) -> None:
    assert split_variant(name) == parts
    assert is_ours(name) == (parts[0] == "cudadent42")


def test_commas_in_brackets_do_not_separate_names() -> None:
    given_names = ["pytorch, cudadent42[portable,block_n=48,warps=4],cudadent42[avx2]", "flash_attn"]
    assert split(given_names) == (
        "pytorch",
        "cudadent42[portable,block_n=48,warps=4]",
        "cudadent42[avx2]",
        "flash_attn",
    )


@given(st.lists(st.text("abc[]=.", min_size=1, max_size=6), max_size=4))
def test_any_names_without_commas_come_back(names: list[str]) -> None:
    whole = [name for name in names if "[" not in name and "]" not in name]
    assert split([",".join(whole)]) == tuple(whole)


@pytest.mark.parametrize(
    ("operation", "name", "words"),
    [
        (
            "attention",
            "cudadent42[smal]",
            "no variant 'smal' (did you mean 'small'?). On CUDA: small, hopper, ",
        ),
        ("attention", "cudadent42[]", "On CPU: amx, avx512_bf16, avx512, avx2, portable"),
        (
            "attention",
            "cudadent42[portable,blockn=48]",
            "no field 'blockn' (did you mean 'block_n'?); it has ",
        ),
        ("attention", "cudadent42[portable,block_n=many]", "block_n is 'many'; expected a whole number"),
        ("attention", "cudadent42[portable,block_n=-1]", "expected a whole number, 0 or more"),
        ("attention", "cudadent42[portable,overlap=maybe]", "overlap is 'maybe'; expected yes or no"),
        ("attention", "cudadent42[portable,ablation=1]", "no field 'ablation'"),
        (
            "attention",
            "cudadent42[avx2,warps=4]",
            "the CPU kernel has nothing to set; expected cudadent42[avx2]",
        ),
        ("attention", "pytorch[portable]", "pytorch has no variants; name it without brackets"),
        ("attention", "nobody[portable]", "unknown implementation 'nobody[portable]'"),
        ("attention_backward", "cudadent42[small]", "On CUDA: short, hopper, two_pass, portable, and fields"),
        ("moe", "cudadent42[few,up.way=sideways]", "up.way is 'sideways'; expected split, tiles, combined"),
        ("moe", "cudadent42[portable,up=1]", "no field 'up'"),
    ],
)
def test_a_variant_that_does_not_exist_is_met_with_those_that_do(
    operation: str, name: str, words: str
) -> None:
    with pytest.raises(UsageError) as raised:
        get(name, operation)
    assert words in str(raised.value)
    assert name in str(raised.value)


def test_a_plan_refuses_an_unknown_variant_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="no variant 'avx3'"):
        make_plan(Choices(suite="small", implementations=("cudadent42[avx3]",)), "cpu", registry)
    plan = make_plan(Choices(suite="small", implementations=("cudadent42[avx2]",)), "cpu", registry)
    assert plan.implementations == ("pytorch", "cudadent42[avx2]")


def test_a_variant_belongs_to_the_devices_that_have_it() -> None:
    assert "not on cuda" in str(why_not(get("cudadent42[avx2]", "attention"), "cuda:0"))
    assert "not on cpu" in str(why_not(get("cudadent42[hopper]", "attention"), "cpu"))
    assert "not on cpu" in str(why_not(get("cudadent42[portable,block_n=48]", "attention"), "cpu"))
    both = get("cudadent42[portable]", "attention")
    assert why_not(both, "cpu") is None
    assert why_not(both, "cuda:0") is None


def test_an_instruction_set_that_this_cpu_lacks_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_features", lambda: frozenset({"avx2", "fma", "f16c"}))
    assert why_not(get("cudadent42[avx2]", "attention"), "cpu") is None
    assert "the CPU lacks avx512" in str(why_not(get("cudadent42[avx512]", "attention"), "cpu"))


@pytest.mark.parametrize(
    ("made", "selection"),
    [
        (attention.variants_of(), FORWARD),
        (attention_backward.variants_of("attention_backward"), BACKWARD),
        (moe.variants_of(), MOE),
    ],
    ids=["attention", "backward", "moe"],
)
def test_the_names_are_those_of_the_kernels(made: variants.Variants, selection: Selection[Any]) -> None:
    assert set(made.configurations) == {kind.value for kind in selection.modules}
    base, _ = split_variant(made.example)
    assert base == "cudadent42"
    assert made.parse(made.example).changes


# ---------------------------------------------------------------- on CPU


SIZES = (1, 2, 2, 96, 96, 64)
CASES = (
    AttentionCase("c", "bf16", *SIZES),
    AttentionBackwardCase("c", "bf16", *SIZES),
    AttentionTrainingStepCase("c", "bf16", *SIZES),
    MoeCase("c", "bf16", 24, 64, 48, 8, 2, "silu"),
)


@pytest.mark.parametrize(
    "case",
    # A training step is made of the two before it.
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case.operation == "attention_training_step"))
        for case in CASES
    ],
    ids=lambda case: case.operation,
)
def test_the_variant_of_every_instruction_set_passes_verification(case: Case) -> None:
    names = tuple(f"cudadent42[{each.value}]" for each in instruction_sets.tested())
    baseline = definition(case.operation).baseline
    plan = Plan("unit", "cpu", (case,), baseline, (baseline, *names), 1, 0, seed=3)
    report = verify(plan, emit=lambda event: None)
    checked = {each.implementation for each in report.cases if each.input == "random"}
    assert checked == {baseline, *names}
    assert [each.detail for each in report.cases if not each.passed] == []


def test_a_variant_runs_the_code_of_its_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_science.cpu import attention as cpu

    asked_for: list[InstructionSet | None] = []
    forward = cpu.forward

    def noted(*tensors: torch.Tensor, **options: Any) -> Any:
        asked_for.append(options["instruction_set"])
        return forward(*tensors, **options)

    monkeypatch.setattr(cpu, "forward", noted)
    case = AttentionCase("c", "fp32", 1, 1, 1, 8, 8, 32)
    inputs = random_inputs(case, 0, 0, "cpu")
    get("cudadent42[portable]", "attention").prepare(case, inputs)()
    assert asked_for == [InstructionSet.PORTABLE]


def test_the_build_has_the_kernels_of_the_variants() -> None:
    other = instruction_sets.AVAILABLE[-1]
    report = build(
        "cpu", (), lambda *told: None, (AttentionCase("c", "fp32", 1, 1, 1, 8, 8, 32),), ("pytorch",)
    )
    assert report.kernels == ()
    asked_for = ("pytorch", f"cudadent42[{other.value}]", "cudadent42")
    cases = (AttentionCase("c", "fp32", 1, 1, 1, 8, 8, 32),)
    report = build("cpu", (), lambda *told: None, cases, asked_for)
    compiled_for = [
        item.recipe.architecture for item in report.kernels if item.recipe.kernel == "attention_forward"
    ]
    expected = list(dict.fromkeys((host.choose_instruction_set(), other)))
    assert [architecture.split(":")[1].split("+")[0] for architecture in compiled_for] == [
        each.value for each in expected
    ]


# ---------------------------------------------------------------- the choice on CUDA, without a GPU


def test_a_kernel_is_configured_as_it_would_be_for_the_case() -> None:
    problem = problem_of()
    assert FORWARD.select(problem, H200).kernel is KernelKind.HOPPER
    for kind in (KernelKind.HOPPER, KernelKind.PORTABLE):
        usual = FORWARD.modules[kind].choose(problem, H200)
        assert usual is not None
        made = chosen(f"cudadent42[{kind.value}]", problem)
        assert (made.kernel, made.configuration) == (kind, usual.configuration)


def test_fields_are_set_and_the_others_stay() -> None:
    problem = problem_of(head_dim=64)
    usual = chosen("cudadent42[portable]", problem).configuration
    made = chosen("cudadent42[portable,block_n=48,overlap=yes,min_blocks=1]", problem).configuration
    assert made == replace(usual, block_n=48, overlap=True, min_blocks=1) != usual


def test_a_kernel_that_leaves_a_case_to_faster_ones_can_be_named() -> None:
    problem = problem_of()
    assert small.choose(problem, H200) is None
    made = chosen("cudadent42[small,warps=8]", problem)
    assert made.configuration == replace(small.configuration_for(problem, H200), warps=8)


def test_a_case_that_the_kernel_cannot_take_is_not_done() -> None:
    with pytest.raises(
        UnsupportedCaseError, match=r"the hopper kernel does not take it: .*do not fill a tile"
    ):
        chosen("cudadent42[hopper]", problem_of(seqlen=32))


def test_parts_of_a_configuration_are_set_by_a_dot() -> None:
    problem = MoeProblem(
        tokens=16,
        hidden=2048,
        intermediate=768,
        experts=128,
        top_k=8,
        dtype=torch.bfloat16,
        activation=Activation.SILU,
        w13_layout=W13Layout.CONCAT,
        ids64=False,
    )
    variant = moe.variants_of().parse("n[few,up.way=tiles,up.stages=3,max_slots=512]")
    made = moe.variant_choice(variant, problem, H200).configuration
    usual = moe.variant_choice(Variant("few", {}), problem, H200).configuration
    assert made == replace(usual, up=replace(usual.up, way=FewWay.TILES, stages=3), max_slots=512)
    assert changed(usual, {}) == usual
    assert settable(type(usual))["down.warps"] is int


def test_what_does_not_build_is_left_out_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoe_science.cuda.driver.make_context_current", lambda index: None)
    made = chosen("cudadent42[portable]", problem_of())

    class Spilling:
        def plan(self, *arguments: object) -> None:
            raise KernelDefectError("attention_portable spills 12 bytes\nand more", "log")

    with pytest.raises(
        UnsupportedCaseError, match=r"^it does not build: attention_portable spills 12 bytes$"
    ):
        compiled(Variant("portable", {}), Spilling(), problem_of(), H200, made)  # type: ignore[arg-type]


def test_a_configuration_that_does_not_fit_the_case_is_refused_by_its_kernel() -> None:
    """Which the lab takes for a case that is not done."""
    problem = problem_of()
    made = chosen("cudadent42[portable,head_dim=64]", problem)
    with pytest.raises(InputError, match="head_dim is 128; expected at most the 64 of the tile"):
        FORWARD.modules[KernelKind.PORTABLE].check(problem, made.configuration)


def test_implementations_from_outside_may_have_variants() -> None:
    base = get("pytorch", "attention")
    own = replace(base, name="own", variants=lambda of, name: replace(of, name=name, variants=None))
    made = named("own[fast]", {"own": own})
    assert made is not None
    assert made.name == "own[fast]"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory are taken for an H200's; nothing is compiled."""
    for module in ("attention.forward", "attention.gradients.backward", "moe.forward"):
        monkeypatch.setattr(sys.modules[f"flashmoe_science.cuda.{module}"], "device_of", lambda index: H200)
    for implementations in (attention, attention_backward, moe):
        monkeypatch.setattr(
            implementations, "compiled", lambda variant, selection, problem, device, made: made
        )


@pytest.mark.usefixtures("without_a_gpu")
def test_attention_is_called_with_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[tuple[Choice, bool, float | None]] = []

    def forward(query: Any, key: Any, value: Any, *, causal: bool, softmax_scale: Any, choice: Choice) -> Any:
        handed.append((choice, causal, softmax_scale))
        return query, None

    monkeypatch.setattr(cuda_attention, "forward", forward)
    case = AttentionCase("c", "bf16", *SIZES, causal=True)
    inputs = AttentionInputs(*(meta(1, 2, 96, 64) for _ in range(3)), softmax_scale=0.5)
    assert get("cudadent42[portable,block_n=32]", "attention").prepare(case, inputs)() is inputs.query
    ((choice, causal, scale),) = handed
    assert (choice.kernel, choice.configuration.block_n, causal, scale) == (
        KernelKind.PORTABLE,
        32,
        True,
        0.5,
    )


@pytest.mark.usefixtures("without_a_gpu")
def test_gradients_are_called_with_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Choice] = []

    def backward(
        grad_output: Any, query: Any, key: Any, value: Any, *rest: Any, choice: Choice, **options: Any
    ) -> Any:
        handed.append(choice)
        return query.clone(), key.clone(), value.clone()

    def forward(query: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query.clone(), query[..., 0].float()

    monkeypatch.setattr(cuda_attention, "forward", forward)
    monkeypatch.setattr(cuda_attention, "backward", backward)
    inputs = BackwardInputs(*(meta(1, 2, 96, 64) for _ in range(4)))
    for case in (AttentionBackwardCase("c", "bf16", *SIZES), AttentionTrainingStepCase("c", "bf16", *SIZES)):
        call = get("cudadent42[portable,query.block_n=32]", case.operation).prepare(case, inputs)
        assert [each.shape for each in call()] == [(1, 2, 96, 64)] * 3
        assert (handed[-1].kernel.value, handed[-1].configuration.query.block_n) == ("portable", 32)


@pytest.mark.usefixtures("without_a_gpu")
def test_experts_are_called_with_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Choice] = []

    def forward(hidden_states: Any, *rest: Any, activation: Activation, choice: Choice, **layout: Any) -> Any:
        handed.append(choice)
        return hidden_states

    monkeypatch.setattr(cuda_moe, "forward", forward)
    case = MoeCase("c", "bf16", 24, 64, 48, 8, 2, "silu")
    weights, ids = meta(24, 2, dtype=torch.float32), meta(24, 2, dtype=torch.int32)
    inputs = MoeInputs(meta(24, 64), meta(8, 96, 64), meta(8, 64, 48), weights, ids)
    get("cudadent42[portable,up.stages=3]", "moe").prepare(case, inputs)()
    assert (handed[0].kernel, handed[0].configuration.up.stages) == (MoeKind.PORTABLE, 3)


# ---------------------------------------------------------------- the suites of benchmarks/suites

SUITES = sorted((Path(__file__).parents[3] / "benchmarks/suites").glob("*.toml"))


def choice_of(name: str, case: Case) -> tuple[KernelModule[Any], Any, Choice]:
    """The variant of a name for a case on an H200: its kernel's module, the problem, and the choice."""
    dtype = torch.bfloat16
    if isinstance(case, MoeCase):
        tokens = torch.empty(case.tokens, case.hidden, dtype=dtype, device="meta")
        w13 = torch.empty(case.experts, 2 * case.intermediate, case.hidden, dtype=dtype, device="meta")
        w2 = torch.empty(case.experts, case.hidden, case.intermediate, dtype=dtype, device="meta")
        weights = torch.empty(case.tokens, case.top_k, device="meta")
        ids = torch.empty(case.tokens, case.top_k, dtype=torch.int32, device="meta")
        tensors = tokens, w13, w2, weights, ids
        routed, _ = moe_asked(tensors, Activation.SILU, W13Layout.CONCAT, H200)
        made = moe.variant_choice(moe.variants_of().parse(name), routed, H200)
        return MOE.modules[made.kernel], routed, made
    assert isinstance(case, AttentionCase)
    query = torch.empty(case.batch, case.num_heads, case.seqlen_q, case.head_dim, dtype=dtype, device="meta")
    key = torch.empty(case.batch, case.num_kv_heads, case.seqlen_k, case.head_dim, dtype=dtype, device="meta")
    problem, _ = asked(query, key, key, case.causal, None, False, H200)
    made = attention.variant_choice(attention.variants_of().parse(name), problem, H200)
    return FORWARD.modules[made.kernel], problem, made


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_variant_of_the_suites_suits_some_case(path: Path) -> None:
    plan = make_plan(Choices(suite=str(path)), "cuda:0", registry)
    assert plan.suite == path.stem
    for name in plan.implementations:
        if split_variant(name)[1] is None:
            continue
        suited = 0
        for case in plan.cases:
            try:
                module, problem, made = choice_of(name, case)
                module.check(problem, made.configuration)
            except NOT_DONE:
                continue
            suited += 1
        assert suited, name
