"""The portable kernels of attention backward with a window and a cap, their source on the CPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from attention_backward import assert_gradients
from emulated import NEEDS_COMPILER
from emulated_portable_backward import FP16, ONE_PASS, TILES, Emulation, case_of, problem_of

from flashmoe_science.configs.attention import backward as configs
from flashmoe_science.cuda.attention.gradients import GradientKind, portable, select
from flashmoe_science.errors import InputError
from flashmoe_science.gradients import Needs
from problems import H200

TWO_PASSES = [name for name in TILES if name not in ONE_PASS]


@pytest.fixture(scope="module")
def emulation() -> Emulation:
    return Emulation()


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("window", "causal"),
    [((9, -1), True), ((0, -1), True), ((40, 3), False), ((-1, 5), False), ((7, -1), False), ((0, 0), False)],
)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("lengths", [(37, 70), (150, 130), (130, 33)], ids=str)
@pytest.mark.parametrize("tiles", TWO_PASSES)
def test_windows_and_caps(
    emulation: Emulation,
    tiles: str,
    lengths: tuple[int, int],
    softcap: float,
    window: tuple[int, int],
    causal: bool,
) -> None:
    """Rows that see no key, and keys that no row sees, among them."""
    case = case_of(lengths, causal=causal, grad_lse=True, heads=(4, 2), window=window, softcap=softcap)
    assert_gradients(case, emulation.backward(case, TILES[tiles]))


@NEEDS_COMPILER
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("tiles", TWO_PASSES)
def test_a_cap_with_any_scale(emulation: Emulation, tiles: str, scale: float) -> None:
    case = case_of((70, 90), scale=scale, softcap=3.0, window=(20, -1), dtype=FP16)
    assert_gradients(case, emulation.backward(case, TILES[tiles]))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "needs", [Needs(True, False, False), Needs(False, True, False), Needs(False, False, True)]
)
def test_one_gradient_with_a_window(emulation: Emulation, needs: Needs) -> None:
    case = case_of((70, 90), window=(20, -1), softcap=2.0)
    assert_gradients(case, emulation.backward(case, TILES[TWO_PASSES[1]], needs))


@NEEDS_COMPILER
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("tiles", TWO_PASSES)
def test_nothing_of_what_a_window_hides_reaches_a_gradient(
    emulation: Emulation, tiles: str, softcap: float
) -> None:
    """Keys 10 to 12 are seen by rows 10 to 22 alone: theirs are the only gradients that NaN in them may reach."""
    case = case_of((100, 100), window=(10, -1), softcap=softcap)
    case.key[:, :, 10:13] = math.nan
    case.value[:, :, 10:13] = math.inf
    of_query, of_key, of_value = emulation.backward(case, TILES[tiles])
    clean = [row for row in range(100) if not 10 <= row <= 22]
    for got, exact, bound in zip((of_query,), case.exact, case.bounds, strict=False):
        assert got is not None
        error = (got.double() - exact).abs()[:, :, clean]
        assert (error <= bound[:, :, clean]).all()
    # A key that shares no row with these keys: before row 10 - 10 = 0 there is none, so those from 23 on.
    for got, exact, bound in zip((of_key, of_value), case.exact[1:], case.bounds[1:], strict=True):
        assert got is not None
        assert ((got.double() - exact).abs() <= bound)[:, :, 23:].all()


@pytest.mark.parametrize("change", [{"window_left": 5}, {"window_right": 5}, {"softcap": 2.0}])
def test_a_window_without_a_mask_or_a_cap_takes_these_kernels_alone(change: dict[str, Any]) -> None:
    problem = dataclasses.replace(problem_of(case_of(head_dim=128, causal=False)), **change)
    choice = select(problem, H200)
    assert choice.kernel is GradientKind.PORTABLE
    portable.check(problem, choice.configuration)
    if "window_right" not in change:
        with pytest.raises(InputError, match="chosen for another problem"):
            portable.check(problem, configs.configuration("sm_90", 128))
