"""Experts with weights of 8 or 4 bits, against the dequantised reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_attention import GuardedMemory
from moe_reference import Moe, interleaved
from quantized_cases import Quantized, assert_right, make
from sanitizers import output_under_sanitizers

from flashmoe_science import DeviceError, InputError, explain, fused_moe
from flashmoe_science.cpu import moe_quantized
from flashmoe_science.cpu.library import SOURCES, load_function
from flashmoe_science.jit import host
from flashmoe_science.jit.host import InstructionSet
from flashmoe_science.moe_arguments import Activation
from flashmoe_science.operators.moe_quantized import FUSED_MOE_QUANTIZED
from flashmoe_science.quantized import dequantized, quantized
from instruction_sets import each_instruction_set

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_width = pytest.mark.parametrize("bits", [8, 4])


each_shape = pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ((1, 32, 32, 1, 1), (32, 32)),
        ((1, 256, 192, 8, 3), (64, 32)),
        ((5, 128, 96, 4, 4), (128, 96)),
        ((37, 192, 64, 5, 2), (96, 64)),
        ((3, 2048, 768, 2, 1), (128, 128)),
        ((16, 384, 192, 4, 2), (192, 64)),
        ((17, 384, 192, 4, 2), (192, 64)),
        ((4, 480, 224, 4, 2), (160, 224)),
    ],
)


@each_instruction_set
@each_dtype
@each_width
@each_shape
def test_shapes_on_every_instruction_set(
    instruction_set: InstructionSet,
    dtype: torch.dtype,
    bits: int,
    sizes: tuple[int, ...],
    groups: tuple[int, int],
) -> None:
    made = make(*sizes, bits=bits, groups=groups, dtype=dtype)  # type: ignore[misc]
    out = moe_quantized.forward(
        *made.tensors,
        **made.scales,
        instruction_set=instruction_set,  # type: ignore[arg-type]
    )
    assert_right(out, made)


SHORT_TYPES = DTYPES[1:]
each_short_dtype = pytest.mark.parametrize(
    "dtype", SHORT_TYPES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def launches(monkeypatch: pytest.MonkeyPatch, further_features: tuple[str, ...]) -> None:
    """Calls take the code for these features besides those of the instruction set."""

    def load(instruction_set: InstructionSet, bits: int) -> Any:
        return load_function(
            "moe_forward", "flashmoe_moe_method", instruction_set, {"WEIGHT_BITS": bits}, further_features
        )

    monkeypatch.setattr(moe_quantized, "_load", load)
    monkeypatch.setattr(moe_quantized, "_plans", {})


def wide_instruction_set() -> InstructionSet:
    """The best that takes VNNI besides."""
    return next(each for each in host.available_instruction_sets() if host.integer_dot_products(each))


@pytest.mark.skipif("avx512_vnni" not in host.cpu_features(), reason="this CPU lacks avx512_vnni")
@each_short_dtype
@each_shape
def test_shapes_without_integer_dot_products(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sizes: tuple[int, ...], groups: tuple[int, int]
) -> None:
    """As on a CPU whose vectors have 512 bits and that lacks VNNI."""
    launches(monkeypatch, ())
    made = make(*sizes, bits=4, groups=groups, dtype=dtype)  # type: ignore[misc]
    out = moe_quantized.forward(*made.tensors, **made.scales, instruction_set=wide_instruction_set())
    assert_right(out, made)


@pytest.mark.skipif("avx512_vnni" not in host.cpu_features(), reason="this CPU lacks avx512_vnni")
def test_integers_are_what_is_multiplied_where_the_cpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another order than numbers of 16 bits are: bits differ somewhere."""
    made = make(3, 2048, 768, 2, 1, bits=4, groups=(128, 128), dtype=torch.float16)
    wide = wide_instruction_set()
    integers = moe_quantized.forward(*made.tensors, **made.scales, instruction_set=wide)
    launches(monkeypatch, ())
    others = moe_quantized.forward(*made.tensors, **made.scales, instruction_set=wide)
    assert not torch.equal(integers, others)


@each_instruction_set
@each_short_dtype
@pytest.mark.parametrize(
    ("sizes", "groups"), [((1, 160, 96, 1, 1), (32, 96)), ((2, 256, 224, 2, 1), (64, 32))]
)
@pytest.mark.parametrize("at_end", [True, False], ids=["behind", "before"])
def test_nothing_beside_the_tensors_is_read(
    instruction_set: InstructionSet,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    groups: tuple[int, int],
    at_end: bool,
) -> None:
    made = make(*sizes, bits=4, groups=groups, dtype=dtype)  # type: ignore[misc]
    guarded = [GuardedMemory(each, at_end) for each in (*made.tensors, *made.scales.values())]
    out = moe_quantized.forward(*(each.tensor for each in guarded), instruction_set=instruction_set)
    assert_right(out, made)


@each_width
def test_no_undefined_behaviour_under_the_sanitizers(bits: int) -> None:
    calls = Path(__file__).parent / "cpu" / "sanitized_quantized_calls.py"
    further = moe_quantized.further_features(host.choose_instruction_set(), bits)
    output = output_under_sanitizers(
        SOURCES / "moe_forward.cpp", calls, str(bits), macros={"WEIGHT_BITS": bits}, further_features=further
    )
    assert "passed" in output


@each_instruction_set
@pytest.mark.parametrize(
    "groups", [(128, 128), (64, 64), (32, 32)], ids=["two-steps", "one-step", "quarters"]
)
@pytest.mark.parametrize(
    ("dtype", "power"),
    [
        (torch.bfloat16, 8),
        (torch.bfloat16, 14),
        (torch.bfloat16, 22),
        (torch.bfloat16, 40),
        (torch.float16, 15),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_a_large_element_hides_no_small_ones(
    instruction_set: InstructionSet, dtype: torch.dtype, groups: tuple[int, int], power: int
) -> None:
    """Where its own weights are zero, all of the result is from elements that are far below it."""
    made = make(2, 256, 128, 2, 1, bits=4, groups=groups, dtype=dtype)
    hidden, w13, w2, weights, ids = made.tensors
    hidden[:, ::64] = 2.0**power
    w13[:, :, ::32] = w13[:, :, ::32] & 0xF0 | 8  # elements 0, 64, 128, ...
    exact = [
        dequantized(numbers, made.scales[name], torch.float64)
        for numbers, name in ((w13, "w13_scales"), (w2, "w2_scales"))
    ]
    plain = Moe(hidden, *exact, weights, ids)
    out = moe_quantized.forward(*made.tensors, **made.scales, instruction_set=instruction_set)
    assert_right(out, Quantized(made.tensors, made.scales, plain))


@each_instruction_set
@each_short_dtype
def test_what_is_not_finite_stays_in_its_row(instruction_set: InstructionSet, dtype: torch.dtype) -> None:
    made = make(4, 256, 128, 2, 2, bits=4, groups=(128, 64), dtype=dtype)
    hidden, *others = made.tensors
    alone = moe_quantized.forward(hidden, *others, **made.scales, instruction_set=instruction_set)
    hidden = hidden.clone()
    hidden[0, 3], hidden[1, 130], hidden[2] = torch.nan, torch.inf, 0.0
    out = moe_quantized.forward(hidden, *others, **made.scales, instruction_set=instruction_set)
    assert out[0].isnan().all()
    assert not out[1].isfinite().any()
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert torch.equal(out[3], alone[3])


@each_instruction_set
@pytest.mark.parametrize(
    ("base", "power"), [(-40, -79), (-40, -81), (-40, -100), (20, 79), (20, 81), (20, 100)]
)
def test_tokens_of_any_size(instruction_set: InstructionSet, base: int, power: int) -> None:
    """Very small and very large tokens scale the result: so does SiLU there."""
    activation = Activation.SILU_NO_MUL
    made = make(3, 256, 128, 2, 2, bits=4, groups=(64, 128), dtype=torch.bfloat16, activation=activation)
    hidden, *others = made.tensors
    first, scaled = (
        moe_quantized.forward(
            hidden * 2.0**exponent, *others, **made.scales, activation=activation, instruction_set=instruction_set
        ).double()
        * 2.0**-exponent
        for exponent in (base, power)
    )  # fmt: skip
    size = float(first.square().mean().sqrt())
    torch.testing.assert_close(scaled, first, rtol=2**-7, atol=2**-7 * size)


@each_width
@pytest.mark.parametrize("activation", Activation, ids=lambda each: each.value)
def test_activations(activation: Activation, bits: int) -> None:
    made = make(9, 64, 96, 4, 2, bits=bits, groups=(32, 32), activation=activation)
    assert_right(fused_moe(*made.tensors, **made.scales, activation=activation.value), made, activation)


@each_width
def test_an_interleaved_layout_has_the_same_bits(bits: int) -> None:
    made = make(4, 64, 96, 4, 2, bits=bits, groups=(32, 32))
    hidden, w13, *others = made.tensors
    scales = {**made.scales, "w13_scales": interleaved(made.scales["w13_scales"])}
    result = fused_moe(hidden, interleaved(w13), *others, **scales, w13_layout="interleaved")
    assert torch.equal(result, fused_moe(*made.tensors, **made.scales))


@each_width
def test_every_number_stands_for_itself(bits: int) -> None:
    """The numbers of a row, one after the other, by tokens that are rows of the identity."""
    size, low = 256, -(2 ** (bits - 1))
    numbers = torch.arange(size).remainder(2**bits) + low
    w13 = numbers.expand(1, 16, size)
    packed = (
        w13.to(torch.int8).contiguous()
        if bits == 8
        else ((w13[..., ::2] + 8) | (w13[..., 1::2] + 8) << 4).to(torch.uint8).contiguous()
    )
    scales = torch.ones(1, 16, 1)
    assert torch.equal(dequantized(packed, scales), w13.float())
    w2, w2_scales = quantized(torch.zeros(1, size, 32), bits=bits, group=32)
    wide = torch.cat((packed, packed), dim=1)
    w2 = w2 if bits == 8 else torch.full_like(w2, 0x88)
    w2[0, :, 0] = 1 if bits == 8 else 0x89
    out = fused_moe(
        torch.eye(size), wide, w2, torch.ones(size, 1), torch.zeros(size, 1, dtype=torch.int32),
        w13_scales=torch.ones(1, 32, 1), w2_scales=torch.ones_like(w2_scales), activation="relu2_no_mul",
    )  # fmt: skip
    torch.testing.assert_close(out, numbers.float().relu().square().view(size, 1).expand(size, size))


def test_rounding_to_fewer_bits_is_within_half_a_step() -> None:
    weights = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(0))
    weights[0, 0, :32] = 0
    for bits in (8, 4):
        numbers, scales = quantized(weights, bits=bits, group=32)
        error = (dequantized(numbers, scales) - weights).unflatten(-1, (-1, 32)).abs()
        assert (error <= 0.5001 * scales.unsqueeze(-1)).all()


def test_the_same_bits_on_any_number_of_threads_and_into_out() -> None:
    made = make(6, 128, 64, 4, 2, bits=4, groups=(64, 32), dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(fused_moe(*made.tensors, **made.scales))
    finally:
        torch.set_num_threads(threads)
    out = torch.empty_like(results[0])
    assert fused_moe(*made.tensors, **made.scales, out=out) is out
    assert all(torch.equal(result, out) for result in results)


def test_a_compiled_call_is_the_operator() -> None:
    made = make(6, 128, 64, 4, 2, bits=4, groups=(64, 32), dtype=torch.bfloat16)

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return fused_moe(*tensors[:5], w13_scales=tensors[5], w2_scales=tensors[6]) * 1

    tensors = (*made.tensors, *made.scales.values())
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), layer(*tensors))
    torch.library.opcheck(FUSED_MOE_QUANTIZED, tensors)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"w2_scales": None}, "w13_scales is given but w2_scales is not"),
    (
        {"w13_scales": None, "w2_scales": None},
        "w13 is torch.uint8 but hidden_states is torch.bfloat16; expected w13_scales and w2_scales",
    ),
    ({"w13": torch.zeros(4, 128, 128)}, "expected int8, or uint8"),
    ({"w2": torch.zeros(4, 128, 64, dtype=torch.int8)}, "w13 is torch.uint8 but w2 is torch.int8"),
    (
        {"w13_scales": torch.ones(4, 128, 2)},
        "w13_scales is torch.float32 but hidden_states is torch.bfloat16",
    ),
    ({"w13_scales": torch.ones(4, 128, 8, dtype=torch.bfloat16)}, "8 groups for rows of 128 weights"),
    ({"w13_scales": torch.ones(4, 64, 2, dtype=torch.bfloat16)}, "expected the same experts and rows"),
    ({"w2": torch.zeros(4, 128, 16, dtype=torch.uint8)}, "w13 has 128 rows for each expert"),
    ({"w13": torch.zeros(4, 128, dtype=torch.uint8)}, "w13 has 2 dimensions"),
    ({"hidden_states": torch.zeros(6, 128, dtype=torch.float64)}, "hidden_states has dtype torch.float64"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    made = make(6, 128, 64, 4, 2, bits=4, groups=(64, 32), dtype=torch.bfloat16)
    names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
    arguments = {**dict(zip(names, made.tensors, strict=True)), **made.scales, **change}
    with pytest.raises(InputError, match=message):
        fused_moe(**arguments)
    with pytest.raises(InputError, match=message):
        explain(fused_moe, **arguments)


def test_explain_names_the_features_that_are_taken_besides() -> None:
    features = {}
    for bits in (8, 4):
        made = make(6, 128, 64, 4, 2, bits=bits, groups=(64, 32), dtype=torch.bfloat16)
        features[bits] = "with avx512_vnni" in explain(fused_moe, *made.tensors, **made.scales).reason
    wide = "avx512f" in host.choose_instruction_set().features
    assert features == {8: False, 4: wide and "avx512_vnni" in host.cpu_features()}


def test_explain_says_that_there_is_no_cuda_kernel() -> None:
    made = make(6, 128, 64, 4, 2, bits=8, groups=(64, 32), dtype=torch.bfloat16)
    assert explain(fused_moe, *made.tensors, **made.scales).kernel == "moe_forward"
    with pytest.raises(DeviceError, match="no CUDA kernel for quantised experts"):
        explain(fused_moe, *made.tensors, **made.scales, gpu="H200")


@pytest.mark.parametrize("way", ["sliced", "expanded", "transposed"])
@pytest.mark.parametrize("name", ["hidden_states", "topk_weights", "topk_ids", "out"])
def test_what_is_not_contiguous_is_refused_in_one_line(name: str, way: str) -> None:
    made = make(4, 64, 96, 4, 2, bits=8, groups=(32, 32))
    names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
    arguments = dict(zip(names, made.tensors, strict=True))
    arguments["out"] = torch.empty_like(made.tensors[0])
    tensor = arguments[name]
    arguments[name] = {
        "sliced": lambda: torch.cat((tensor, tensor), dim=1)[:, : tensor.shape[1]],
        "expanded": lambda: tensor[:1].expand(tensor.shape),
        "transposed": lambda: tensor.t().contiguous().t(),
    }[way]()
    with pytest.raises(InputError, match=rf"^{name} is not contiguous \(shape .*\); [^\n]*$"):
        fused_moe(**arguments, **made.scales)
