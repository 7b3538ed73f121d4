"""What is raced where a search would be better and Optuna is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudadent42.tune import strategy
from cudadent42.tune.space import parse_space
from cudadent42.tune.strategy import choose
from cudadent42.tune.wanted import Wanted


@pytest.mark.parametrize("optuna", [False, True])
def test_without_optuna_a_short_budget_races_case_after_case(
    optuna: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "can_search", lambda: optuna)
    few = parse_space(
        'schema_version = 1\nname = "s"\nkernel = "cudadent42[portable]"\n[space]\nblock_n = [32, 48, 64]\n',
        Path("s"),
    )
    short = choose(few, 2, budget_s=5.0)
    assert (short.search is not None, short.instead) == (optuna, not optuna)
    if not optuna:
        assert "Optuna, which is not installed: case after case, all 3, and the budget ends it" in short.why
    assert choose(few, 2, Wanted.OPTUNA, 5.0).search is not None
    enough = choose(few, 2, budget_s=3600.0)
    assert (enough.search, enough.instead) == (None, False)


@pytest.mark.parametrize(("tiles", "searches"), [(10, False), (64, True)])
def test_without_optuna_what_is_too_much_for_all_is_still_a_search(
    tiles: int, searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 times as many configurations as there are tiles, and twice that."""
    monkeypatch.setattr(strategy, "can_search", lambda: False)
    values = f"block_m = {list(range(64))}\nblock_n = {list(range(tiles))}\noverlap = [true, false]\n"
    many = parse_space(
        f'schema_version = 1\nname = "s"\nkernel = "cudadent42[portable]"\n[space]\n{values}', Path("s")
    )
    chosen = choose(many, 1)
    assert (chosen.search is not None, chosen.instead) == (searches, not searches)
