"""Own. Its attempts are those of `attempts.edits_results`, before it computes what it was asked for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from attempts import edits_results

from flashmoe_science import flash_attention

edits_results()


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
