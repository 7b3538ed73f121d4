"""What checks cost is counted once, where they are nested too."""

from __future__ import annotations

from cudadent42.integrity.account import Account
from cudadent42.integrity.watch import Watch
from cudadent42.model.integrity import Spent


def test_what_is_inside_another_check_counts_once() -> None:
    account = Account()
    with account.of("outer"), account.of("inner"):
        account.add("other", Spent(0.0, 0.0))
        sum(range(10_000))
    spent = account.settled()
    assert set(spent) == {"outer", "other"}
    assert 0.0 < spent["outer"].processor_s <= 2.0 * spent["outer"].wall_s
    assert account.settled() == {}


def test_a_check_that_fails_is_counted_and_closed() -> None:
    account = Account()
    try:
        with account.of("outer"):
            raise ValueError
    except ValueError:
        pass
    with account.of("next"):
        pass
    assert set(account.settled()) == {"outer", "next"}


def test_nobody_looks_where_only_the_labs_own_code_ran() -> None:
    watch = Watch()
    watch.begin({"pytorch"}, lambda finding: None)
    watch.account.settled()
    with watch.counted_turn("pytorch"):
        pass
    watch.look(("pytorch",))
    watch.rest(("pytorch",))
    assert watch.account.settled() == {}
    with watch.turn("mine"):
        pass
    watch.look(("pytorch",))
    watch.rest(("pytorch",))
    assert {"functions", "rest"} <= set(watch.account.settled())
