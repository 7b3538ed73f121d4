"""25. The same in another thread, where no mode of the caller's sees PyTorch's operators.

Our own, against the lab as it was when it had learned to see the operators of a call.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

POOL = ThreadPoolExecutor(1)


def attention(query, key, value, *, causal, softmax_scale):
    call = torch.nn.functional.scaled_dot_product_attention
    return POOL.submit(call, query, key, value, is_causal=causal, scale=softmax_scale).result()
