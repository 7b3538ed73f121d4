"""A training step of attention: forward pass and backward pass in one call."""

from __future__ import annotations

from cudadent42.operations.attention_backward import definition
from cudadent42.operations.attention_backward.case import AttentionTrainingStepCase

OPERATION = definition(AttentionTrainingStepCase)
