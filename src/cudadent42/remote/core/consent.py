"""What a user has to agree to, because nothing but this machine would end what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WHILE_IT_COSTS_S = 120.0
"""For an answer while a machine is on that nothing else ends: who walked away has not agreed."""

Ask = Callable[[str, float | None], bool]
"""Puts a question, to be answered within so many seconds (None: at leisure). No answer is a no."""


@dataclass(frozen=True)
class Consent:
    """How a user agrees: beforehand, or when asked. By default nobody does."""

    given: bool = False
    """With ``--yes``."""
    ask: Ask | None = None
    """None where there is nobody to answer."""

    def to(self, question: str, within_s: float | None = None) -> bool:
        return self.given or self.asked(question, within_s)

    def asked(self, question: str, within_s: float | None = None) -> bool:
        return self.ask is not None and self.ask(question, within_s)


NOBODY = Consent()
