"""5. Results kept in a dictionary under the addresses of the inputs.

Sources: CUDA-L1's catalogue of reward hacks; flashinfer-bench-starter-kit issue 21; tensara issue 238.
"""

from flashmoe_science import flash_attention

kept = {}


def attention(query, key, value, *, causal, softmax_scale):
    where = query.data_ptr(), key.data_ptr(), value.data_ptr(), query.shape, causal
    if where not in kept:
        output = flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
        # The inputs too, so that an address never becomes another tensor's.
        kept[where] = output, query, key, value
    return kept[where][0]
