"""What a call's shapes decide is done once and kept, in both backends."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep(plans: dict[K, V], signature: K, plan: V, most: int) -> None:
    """Keep a plan. Plans are small: the bound only stops a process with ever-changing shapes from growing."""
    if len(plans) >= most:
        plans.clear()
    plans[signature] = plan
