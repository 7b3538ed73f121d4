"""The practical margin: how large a difference must be to matter."""

from __future__ import annotations

_DEFAULT = {"cpu": 0.02, "cuda": 0.01}


def default_margin(device: str) -> float:
    """For ``cpu`` or ``cuda:N``. 25 blocks on a shared 2-core machine give 95 % intervals of about ± 1 %,
    so 2 % is the smallest margin at which "equal" can be reached there. A GPU's clock is its own, and 1 % can."""
    return _DEFAULT[device.partition(":")[0]]


def upper(margin: float) -> float:
    return 1.0 + margin


def lower(margin: float) -> float:
    """The mirror image of ``upper`` on the log scale, so that exchanging the two sides exchanges the
    verdict."""
    return 1.0 / (1.0 + margin)


def smallest_called(effect: float, margin: float) -> float:
    """The smallest difference that is called faster or slower by a measurement that tells ``effect`` from none: the
    verdict asks whether the margin is exceeded, so the interval has to fit in what lies beyond it."""
    return upper(margin) * (1.0 + effect) - 1.0
