"""What one draw of random values decides, and what takes a second or a third.

A bound is twice PyTorch's error on the same values. The largest errors of two honest kernels differ by more than that
now and then, most of all where there are few values: once in some hundreds of tiny shapes. What is wrong by
construction is off on other values as well. Where the yardstick rounds less often than PyTorch's operations do one by
one, as that of experts' gradients, it is more often: of 60 draws of a layer of 16 tokens PyTorch's own were over in 8.
Twice in a row that is one run in sixty, three times one in four hundred.

Only what is a largest error is drawn again, of an entry, a row or a block. The RMS is a mean over all values of a
result or of a part, which chance moves little: whoever computes with less precision, but not where a second look is to
be expected, is over that bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cudadent42.model.records import VerifiedCase

MOST_DRAWS = 3
"""After so many a result that was marginal in each of them is wrong."""

GROSS_FACTOR = 2.0
"""From this many bounds on one draw decides. The largest errors of honest kernels were at most 1.25 bounds."""


def is_marginal(judged: VerifiedCase) -> bool:
    """Whether it failed by its largest errors alone, and by less than ``GROSS_FACTOR``."""
    error, bound = judged.error, judged.bound
    if judged.passed or error is None or bound is None:
        return False  # of the wrong form, or not a number where there has to be one
    largest = [(error.max, bound.max), (error.worst_row, bound.worst_row)]
    over = any(norm > allowed for norm, allowed in largest)  # if none is, it failed for another reason
    means = error.rms <= bound.rms and all(part.of_all.within for part in judged.parts)
    return over and means and all(norm <= GROSS_FACTOR * allowed for norm, allowed in largest)


def decided(first: VerifiedCase, second: VerifiedCase) -> VerifiedCase:
    """The verdict where ``first`` was marginal: that on other values, which tells of the first."""
    if not second.passed:
        return replace(second, detail=f"{second.detail}; and on the values before: {first.detail}")
    return replace(
        second, detail=f"within every bound on another draw of values; on the one before: {first.detail}"
    )


def wrong_result(
    judged: Sequence[VerifiedCase], again: Callable[[], Sequence[VerifiedCase]]
) -> VerifiedCase | None:
    """The first that is wrong, if any. A marginal one does not count if those of ``again``, of other values, are right
    in one of the further draws; where there are none of those, it does."""
    failed = [each for each in judged if not each.passed]
    for _ in range(MOST_DRAWS - 1):
        gross = next((each for each in failed if not is_marginal(each)), None)
        if gross is not None or not failed:
            return gross
        further = again()
        if not further:
            break
        failed = [decided(failed[0], each) for each in further if not each.passed]
    return failed[0] if failed else None
