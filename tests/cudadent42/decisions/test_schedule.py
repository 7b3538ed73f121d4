from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cudadent42.decisions.schedule import ROUND_BLOCKS, alternating, block_orders, control_name, rounds

NAMES = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=5, unique=True)


@given(NAMES, st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_every_block_holds_each_once(names: list[str], blocks: int, seed: int) -> None:
    orders = block_orders(names, blocks, seed, "case")
    assert len(orders) == blocks
    assert all(Counter(order) == Counter(names) for order in orders)


@given(NAMES, st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_same_seed_same_order_and_mirrored_pairs(names: list[str], blocks: int, seed: int) -> None:
    orders = block_orders(names, blocks, seed, "case")
    assert orders == block_orders(names, blocks, seed, "case")
    for first, second in zip(orders[::2], orders[1::2], strict=False):
        assert second == tuple(reversed(first))


def test_seed_and_case_change_the_order() -> None:
    names = ["a", "b", "c"]
    base = block_orders(names, 40, 0, "one")
    assert base != block_orders(names, 40, 1, "one")
    assert base != block_orders(names, 40, 0, "two")


def test_linear_drift_cancels_in_pairs_of_blocks() -> None:
    """Each name's mean position over an even number of blocks is the same."""
    orders = block_orders(["a", "b", "c"], 26, 7, "case")
    positions = {name: sum(order.index(name) for order in orders) for name in "abc"}
    assert set(positions.values()) == {26}


def test_control_has_a_name_of_its_own() -> None:
    assert control_name("pytorch") == "pytorch_control"


@given(st.integers(1, 200))
def test_rounds_hold_every_block_once_and_keep_pairs_together(blocks: int) -> None:
    visits = rounds(blocks)
    assert [block for visit in visits for block in visit] == list(range(blocks))
    assert all(visit.start % 2 == 0 for visit in visits)
    assert len(visits) == max(1, blocks // ROUND_BLOCKS)


@given(st.integers(1, 7))
def test_passes_of_a_block_mirror_each_other(passes: int) -> None:
    orders = alternating(["a", "b", "c"], passes)
    assert len(orders) == passes
    assert all(each == (["a", "b", "c"] if i % 2 == 0 else ["c", "b", "a"]) for i, each in enumerate(orders))
