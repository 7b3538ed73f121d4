"""3. A subclass of Tensor that computes when the checker looks at it.

Sources: reference-kernels issue 162; SOL-ExecBench, check_lazy_outputs.
"""

import torch

from flashmoe_science import flash_attention


class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def real(item):
            return item.compute() if isinstance(item, Lazy) else item

        return function(*map(real, args), **(kwargs or {}))


def attention(query, key, value, *, causal, softmax_scale):
    output = torch.Tensor._make_subclass(Lazy, torch.empty_like(query))
    output.compute = lambda: flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
    return output
