"""The name under which transformers finds attention and experts."""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface

from flashmoe_science.huggingface.attention import attention_forward
from flashmoe_science.huggingface.experts import experts_forward
from flashmoe_science.huggingface.masks import attention_mask
from flashmoe_science.huggingface.paging import PAGED_IMPLEMENTATION, no_mask, paged_attention_forward

IMPLEMENTATION = "cudadent42"
"""For ``attn_implementation`` and ``experts_implementation``. The library takes a name with "flash" in it for a version
of flash-attention, and the masks that it then makes would be others.
"""


def register() -> None:
    """Make the name known to transformers; again does no harm.

    A name without a function for masks would get none at all, and padding would be attended to.
    """
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)
    ExpertsInterface.register(IMPLEMENTATION, experts_forward)
    AttentionInterface.register(PAGED_IMPLEMENTATION, paged_attention_forward)
    AttentionMaskInterface.register(PAGED_IMPLEMENTATION, no_mask)


def uses(config: Any, implementation: str) -> bool:
    """Whether a configuration names it for attention or experts; else what was taken is the library's again."""
    return implementation in (config._attn_implementation, getattr(config, "_experts_implementation", None))
