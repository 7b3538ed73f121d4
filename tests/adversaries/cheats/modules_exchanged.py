"""18. ``sys.modules`` gives another module under the lab's name.

Source: pygpubench, submission_replace_torch.
"""

import sys
import types

from cudadent42.correctness import truth
from flashmoe_science import flash_attention

false = types.ModuleType(truth.__name__)
vars(false).update(vars(truth))
sys.modules[truth.__name__] = false


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
