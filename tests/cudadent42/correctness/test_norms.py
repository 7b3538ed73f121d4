"""How far a result lies from its reference, where all entries are finite and where some are not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.correctness import norms
from cudadent42.model.records import ErrorNorms

SPECIAL = (math.nan, math.inf, -math.inf)


@given(
    shape=st.sampled_from(((), (1,), (0,), (5, 3), (0, 4), (3, 0), (2, 3, 17))),
    scale=st.sampled_from((0.0, 1e-6, 1.0, 1e4)),
    special=st.sampled_from((None, *SPECIAL)),
    seed=st.integers(0, 1000),
)
def test_the_way_for_finite_entries_gives_the_bits_of_the_other(
    shape: tuple[int, ...], scale: float, special: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    result = (reference + 1e-3 * torch.randn(shape, generator=generator, dtype=torch.float64)).float()
    if special is not None and result.numel():
        result.view(-1)[seed % result.numel()] = special
    quick = norms.error_norms(result, reference)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "all_finite", lambda tensor: False)
        assert repr(norms.error_norms(result, reference)) == repr(quick)


def test_norms_of_a_known_error() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.nan, 5.0]], dtype=torch.float64)
    result = torch.tensor([[3.0, 5.0], [0.0, 0.0], [math.nan, 5.0]])
    rms = math.sqrt(50.0 / 5)
    assert norms.error_norms(result, reference) == ErrorNorms(
        max=pytest.approx(1.0 / rms),
        rms=pytest.approx(math.sqrt(1 / 5) / rms),
        worst_row=pytest.approx(math.sqrt(1 / 2) / math.sqrt(25 / 2)),
    )


@pytest.mark.parametrize("special", SPECIAL)
def test_one_entry_is_enough_not_to_be_finite(special: float) -> None:
    values = torch.ones(1000)
    assert norms.all_finite(values)
    values[567] = special
    assert not norms.all_finite(values)


def test_entries_whose_sum_is_too_large_are_looked_at_one_by_one() -> None:
    assert not norms.all_finite(torch.full((100,), 6e4, dtype=torch.float16))
    assert norms.error_norms(
        torch.full((2, 50), 6e4).half(), torch.full((2, 50), 6e4).double()
    ) == ErrorNorms(0.0, 0.0, 0.0)
