"""A training step of a mixture of experts: forward pass and backward pass in one call."""

from __future__ import annotations

from cudadent42.operations.moe_backward import definition
from cudadent42.operations.moe_backward.case import MoeTrainingStepCase

OPERATION = definition(MoeTrainingStepCase)
