"""What a contestant says of its outputs ahead of the clock's end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cudadent42.audit.sketch import SUMS, differing, read, sketches, written

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def outputs(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7, 9, 64), (2, 3), (3, 256), (1, 257), (4,), (2, 0, 8)])
def test_the_same_outputs_have_the_same_sketch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    results = outputs(dtype, *shape)
    said = read(written(sketches(results, 7)[0]), len(results))
    assert said is not None
    assert differing(said, results, 7) == 0
    assert differing(said[-1:], results[-1:], 7) == 0  # looked at alone


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hundredth_that_came_later_is_seen(dtype: torch.dtype) -> None:
    results = outputs(dtype, 1, 500, 128)
    early = results.clone()
    early[0, 100:105] = 0
    said, _ = sketches(early, 7)
    assert differing(said, results, 7) > SUMS / 2


def test_results_of_less_precision_are_seen() -> None:
    results = outputs(torch.bfloat16, 1, 500, 128)
    mantissa, exponent = torch.frexp(results.float())
    coarse = torch.ldexp((mantissa * 8).round() / 8, exponent).to(torch.bfloat16)  # three bits
    said, _ = sketches(coarse, 7)
    assert differing(said, results, 7)


def test_tf32_for_fp32_is_seen() -> None:
    results = outputs(torch.float32, 1, 500, 128)
    mantissa, exponent = torch.frexp(results)
    said, _ = sketches(torch.ldexp((mantissa * 2048).round() / 2048, exponent), 7)
    assert differing(said, results, 7)


def test_rounding_in_another_order_is_not() -> None:
    results = outputs(torch.bfloat16, 1, 500, 128)
    said, deviation = sketches(results, 7)
    assert differing(said + 0.003 * deviation, results, 7) == 0


def test_what_is_said_of_other_signs_is_of_no_use() -> None:
    results = outputs(torch.float32, 1, 500, 128)
    assert differing(sketches(results, 8)[0], results, 7) > SUMS / 2


def test_the_low_bits_do_not_make_what_was_said_true() -> None:
    """As they do of a checksum: within the tolerance of a result, a sum moves no further than they go themselves."""
    results = outputs(torch.bfloat16, 1, 500, 128)
    said = torch.zeros(1, SUMS)
    _, deviation = sketches(results, 7)
    for _ in range(20):
        own, _ = sketches(results, 7)
        nudged = results * (1 + 2.0**-8 * torch.sign(torch.randn(results.shape))).to(results.dtype)
        nearer = (sketches(nudged, 7)[0] - said).abs().sum() < (own - said).abs().sum()
        results = nudged if nearer else results
    assert differing(said, results, 7) > SUMS / 2
    assert float(deviation) > 0.0


@pytest.mark.parametrize("text", ["", "not base64!", "AAAA", written(torch.zeros(3, SUMS))])
def test_what_is_no_sketch_is_none(text: str) -> None:
    assert read(text, 2) is None


def test_what_is_not_a_number_is_equal_to_itself() -> None:
    results = torch.full((1, 300), float("nan"))
    assert differing(sketches(results, 7)[0], results, 7) == 0
    results = torch.full((1, 300), 6e4, dtype=torch.float16)  # sums overflow
    assert differing(sketches(results, 7)[0], results, 7) == 0


def test_products_of_the_process_may_be_summed_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a sketch are not, so an honest candidate says what the judge does."""
    cublas, asked = torch.backends.cuda.matmul, []
    product = Tensor.__matmul__

    def watched(self: Tensor, other: Tensor) -> Tensor:
        if self.dtype is torch.float16:
            asked.append(cublas.allow_fp16_accumulation)
        return product(self, other)

    monkeypatch.setattr(Tensor, "__matmul__", watched)
    cublas.allow_fp16_accumulation = True
    try:
        sketches(outputs(torch.float16, 3, 512), 7)
        assert cublas.allow_fp16_accumulation
    finally:
        cublas.allow_fp16_accumulation = False
    assert asked == [False]
