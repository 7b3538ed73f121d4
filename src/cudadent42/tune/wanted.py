"""What a user asks of a tuning's search. By itself, so that the command line reads it without the rest."""

from __future__ import annotations

from enum import Enum


class Wanted(str, Enum):
    AUTO = "auto"
    EXHAUSTIVE = "exhaustive"
    OPTUNA = "optuna"
