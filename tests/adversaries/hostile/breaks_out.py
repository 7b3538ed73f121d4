"""Own. Its attempts are those of `attempts.breaks_out`, before it computes what it was asked for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from attempts import breaks_out

from flashmoe_science import flash_attention

breaks_out()


def attention(query, key, value, *, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
