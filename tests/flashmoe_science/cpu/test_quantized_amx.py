"""Weights of 8 and 4 bits on the matrix unit: by loops in place of its instructions, and by these where there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpu_attention import GuardedMemory, Threads
from matrix_unit import UNITS, code_of, code_of_pairs
from moe_reference import interleaved
from quantized_cases import Quantized, assert_right, make

from flashmoe_science.cpu import library, moe_quantized
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Activation, W13Layout

BF16 = torch.bfloat16
each_width = pytest.mark.parametrize("bits", [8, 4])


@pytest.fixture(scope="module", autouse=True, params=UNITS)
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every call of the kernel takes the code for the matrix unit."""
    instruction_set, macros = code_of(request.param)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, instruction_set, macros)
        yield request.param


def use(patch: pytest.MonkeyPatch, instruction_set: InstructionSet, macros: dict[str, int]) -> None:
    load = library.load_function
    patch.setattr(moe_quantized, "_plans", {})
    patch.setattr(
        moe_quantized,
        "_load",
        lambda _, bits: load(
            "moe_forward",
            "flashmoe_moe_method",
            instruction_set,
            {"WEIGHT_BITS": bits, **macros},
            moe_quantized.further_features(instruction_set, bits),
        ),
    )


def forward(made: Quantized, **options: object) -> torch.Tensor:
    return moe_quantized.forward(*made.tensors, **made.scales, **options)  # type: ignore[arg-type]


@each_width
@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ((17, 32, 32, 1, 1), (32, 32)),
        ((40, 64, 96, 1, 1), (64, 32)),
        ((33, 192, 64, 5, 2), (96, 64)),
        ((65, 96, 160, 3, 3), (32, 160)),
        ((259, 32, 64, 1, 1), (32, 64)),
        ((24, 2048, 768, 2, 1), (128, 128)),
        ((70, 256, 128, 16, 4), (128, 64)),
    ],
)
def test_shapes(bits: int, sizes: tuple[int, ...], groups: tuple[int, int]) -> None:
    """Whole registers and less of tokens and rows; groups of one register and more; few tokens beside many."""
    made = make(*sizes, bits=bits, groups=groups, dtype=BF16)  # type: ignore[misc]
    out = forward(made)
    assert_right(out, made)
    for threads in (1, 3):
        with Threads(threads):
            assert torch.equal(forward(made), out)


@each_width
@pytest.mark.parametrize("activation", Activation, ids=lambda each: each.value)
def test_activations_and_layouts(activation: Activation, bits: int) -> None:
    made = make(40, 64, 96, 4, 2, bits=bits, groups=(32, 32), dtype=BF16, activation=activation)
    out = forward(made, activation=activation)
    assert_right(out, made, activation)
    if activation is Activation.SILU:
        hidden, w13, *others = made.tensors
        scales = {**made.scales, "w13_scales": interleaved(made.scales["w13_scales"])}
        turned = Quantized((hidden, interleaved(w13), *others), scales, made.plain)
        assert torch.equal(forward(turned, w13_layout=W13Layout.INTERLEAVED), out)


@each_width
def test_what_is_not_finite_stays_in_its_row(bits: int) -> None:
    made = make(20, 256, 128, 2, 2, bits=bits, groups=(128, 64), dtype=BF16)
    alone = forward(made)
    hidden = made.tensors[0].clone()
    hidden[0, 3], hidden[1, 130], hidden[2] = torch.nan, torch.inf, 0.0
    out = forward(Quantized((hidden, *made.tensors[1:]), made.scales, made.plain))
    assert out[0].isnan().all()
    assert not out[1].isfinite().any()
    assert (out[2] == 0).all()
    assert torch.equal(out[3:], alone[3:])


@each_width
@pytest.mark.parametrize("at_end", [True, False], ids=["behind", "before"])
def test_nothing_beside_the_tensors_is_read(bits: int, at_end: bool) -> None:
    """Sanitizers do not see what the unit's own instructions read; a page of memory that is not there does."""
    made = make(33, 96, 64, 3, 2, bits=bits, groups=(32, 64), dtype=BF16)
    tensors = tuple(GuardedMemory(each, at_end).tensor for each in made.tensors)
    scales = {name: GuardedMemory(each, at_end).tensor for name, each in made.scales.items()}
    assert torch.equal(forward(Quantized(tensors, scales, made.plain)), forward(made))


@each_width
def test_the_matrix_unit_is_what_computes(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums have another order than those of dot products: bits differ somewhere."""
    made = make(64, 1024, 512, 2, 2, bits=bits, groups=(128, 128), dtype=BF16)
    on_the_unit = forward(made)
    use(monkeypatch, *code_of_pairs())
    assert not torch.equal(forward(made), on_the_unit)
