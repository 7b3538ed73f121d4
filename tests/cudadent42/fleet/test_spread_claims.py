"""What the parts of a fleet's run, each audited by itself, confirm of the claim of all of them."""

from __future__ import annotations

from dataclasses import replace

from cudadent42.decisions.claims import SHORT_MS, with_claim
from cudadent42.fleet.spread import combined_integrity
from cudadent42.model.integrity import Confirmation, Integrity
from cudadent42.model.records import Comparison, Results, Verdict


def part(name: str, speedup: float, verdict: Verdict, *, confirmed: bool | None) -> Results:
    """A run of one case; ``confirmed``: None where nobody looked."""
    low, high = 0.98 * speedup, 1.02 * speedup
    row = Comparison(
        name, "fp32", "mine", "pytorch", speedup, low, high, verdict, 10.0 / speedup, 10.0, blocks=25
    )
    seen = Confirmation(f"{name}/fp32", "mine", 1.0, 0.9, 1.1, 5.0, 10.0, 12, 4, bool(confirmed))
    checked = Integrity(
        confirmations=() if confirmed is None else (seen,),
        drawn_by_gain=True,
        highest_first=True,
        short_ms=SHORT_MS,
    )
    return Results("pytorch", "mine", speedup, low, high, verdict, 0.02, 0.0, (row,), integrity=checked)


def together(*parts: Results) -> Results:
    whole = replace(
        parts[0],
        cases=tuple(row for each in parts for row in each.cases),
        verdict=Verdict.FASTER,
        integrity=None,
    )
    return with_claim(replace(whole, integrity=combined_integrity(parts, whole)), verified=True)


def test_what_is_only_seen_not_to_be_slower_confirms_no_gain() -> None:
    whole = together(
        part("fast", 4.0, Verdict.FASTER, confirmed=True),
        part("equal", 1.0, Verdict.EQUAL, confirmed=True),
        part("slow", 0.9, Verdict.SLOWER, confirmed=True),
    )
    assert whole.claim_allowed
    assert "confirmed on 1 of 3 cases" in whole.claim_reason


def test_what_is_slower_than_it_says_still_ends_the_claim() -> None:
    whole = together(
        part("fast", 4.0, Verdict.FASTER, confirmed=True), part("equal", 1.0, Verdict.EQUAL, confirmed=False)
    )
    assert not whole.claim_allowed
    assert "not confirmed on equal/fp32" in whole.claim_reason


def test_the_chance_is_that_of_cases_that_are_drawn_by_what_they_gain() -> None:
    gained = [part(name, 4.0, Verdict.FASTER, confirmed=True) for name in "abc"]
    unseen = [part(name, 2.0, Verdict.FASTER, confirmed=None) for name in "de"]
    whole = together(*gained, *unseen)
    # The highest is not drawn, so two of four are: 1 - (2/3)^2.
    assert "the highest speed-up is one of them; if a third of what is gained were not" in whole.claim_reason
    assert "in 56% of runs" in whole.claim_reason


def test_a_highest_speed_up_that_nobody_saw_is_not_said_to_be_confirmed() -> None:
    whole = together(
        part("seen", 2.0, Verdict.FASTER, confirmed=True), part("unseen", 4.0, Verdict.FASTER, confirmed=None)
    )
    assert "highest" not in whole.claim_reason
    assert "in 33% of runs" in whole.claim_reason
