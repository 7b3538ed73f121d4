"""Scripts as users have them, for the tests of `cudadent42 capture`."""

TRAIN = '''
"""A toy model: causal attention over packed projections, trained; and a validation without gradients."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
steps = int(sys.argv[1])
qkv = nn.Linear(64, 192)
optimizer = torch.optim.SGD(qkv.parameters(), lr=1e-3)


def attend(x, causal, **options):
    query, key, value = qkv(x).view(2, 24, 3, 4, 16).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, **options)


for _ in range(steps):
    attend(torch.randn(2, 24, 64), True).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        attend(torch.randn(2, 24, 64), False)
        attend(torch.randn(2, 24, 64), False, dropout_p=0.5)
print("trained", sys.argv[1:])
'''

SERVE = '''
"""Experts and a growing text, by this project's own functions and by PyTorch's, from threads too."""
import threading

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashmoe_science
from flashmoe_science import flash_attention, fused_moe

torch.manual_seed(0)
tokens, w13, w2 = torch.randn(8, 32), torch.randn(4, 64, 32), torch.randn(4, 32, 32)
weights, ids = torch.full((8, 2), 0.5), torch.randint(0, 4, (8, 2))
query, cache = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 64, 32)
with torch.inference_mode():
    for length in range(10, 50):
        key = cache[:, :, :length]
        sdpa(query, key, key, enable_gqa=True, scale=0.5)
        fused_moe(tokens, w13, w2, weights, ids)
    flash_attention(query, cache, cache)
    with flashmoe_science.sdpa():  # which took the function before this script had it by name
        torch.nn.functional.scaled_dot_product_attention(query, cache, cache, enable_gqa=True)

    def work():
        for _ in range(5):
            sdpa(query, cache, cache, enable_gqa=True)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
'''

RAISES = TRAIN + '\nraise ValueError("on purpose")\n'
EXITS = TRAIN + "\nsys.exit(17)\n"
QUANTIZED = """
import torch

from flashmoe_science import fused_moe
from flashmoe_science.quantized import quantized

w13, w13_scales = quantized(torch.randn(2, 64, 64), bits=4, group=32)
w2, w2_scales = quantized(torch.randn(2, 64, 32), bits=4, group=32)
routing = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)
fused_moe(torch.randn(3, 64), w13, w2, *routing, w13_scales=w13_scales, w2_scales=w2_scales)
"""
NOTHING = "print('no attention here')\n"
BLOCKS = """
import torch
from torch.nn import functional as F

import cudadent42

query = torch.randn(1, 2, 16, 32)
F.scaled_dot_product_attention(query, query, query, is_causal=True)
for _ in range(3):
    with cudadent42.capture("elsewhere.toml"):
        with cudadent42.capture():
            F.scaled_dot_product_attention(query, query, query)
    F.scaled_dot_product_attention(query, query, query, is_causal=True)
"""
