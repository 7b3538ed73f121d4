"""Attention and experts for Hugging Face transformers, under the name ``cudadent42``; importing this registers them.

``AutoModelForCausalLM.from_pretrained(..., attn_implementation="cudadent42", experts_implementation="cudadent42")``
then uses them, and `accelerate` sets both on a model that is there already. Calls that the kernels do not take go to
the library's own implementations; `flashmoe_science.report` says which and why.
"""

from flashmoe_science.errors import InputError
from flashmoe_science.huggingface.version import OLDEST, reject_older
from flashmoe_science.jit.requirements import install_command

try:
    import transformers.integrations.moe  # there since transformers 5

    reject_older(transformers.__version__)
except ImportError as error:
    raise InputError(
        f"transformers {OLDEST} or newer cannot be imported ({error}); on Python 3.11 or newer, install it with: "
        f"{install_command('transformers')}"
    ) from error

from flashmoe_science.huggingface.acceleration import Acceleration, accelerate
from flashmoe_science.huggingface.paging import paged_attention
from flashmoe_science.huggingface.registration import IMPLEMENTATION, register

__all__ = ["IMPLEMENTATION", "Acceleration", "accelerate", "paged_attention"]

register()
