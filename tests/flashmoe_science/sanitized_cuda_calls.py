"""Run by tools/sanitize.sh under compute-sanitizer: every kernel that this GPU takes, on small shapes.

Usage: python sanitized_cuda_calls.py [KERNEL...]

Outputs lie in guarded buffers, and each is compared with float32, so that a kernel that does nothing does not pass.
Prints "passed" when all calls were right; a wrong one raises.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_attention import choices, random_qkv, reference, run_guarded

from flashmoe_science.cuda.attention import KernelKind

# (seqlen_q, seqlen_k), head_dim: partial tiles, several blocks of keys, rows without keys, padded head dims.
CALLS = [
    *[((1, 1), 64), ((3, 37), 64), ((65, 300), 64), ((129, 65), 64), ((200, 513), 64)],
    *[
        ((70, 129), 72),
        ((130, 257), 128),
        ((64, 0), 128),
        ((65, 100), 96),
        ((70, 170), 192),
        ((65, 130), 256),
    ],
    # Keys split over the grid.
    *[((1, 20003), 64), ((1, 9001), 120), ((3, 4000), 256)],
]


def main() -> None:
    kinds = [KernelKind(name) for name in sys.argv[1:]] or list(KernelKind)
    launches = dict.fromkeys(kinds, 0)
    for lengths, head_dim in CALLS:
        for causal, dtype in ((False, torch.float16), (True, torch.bfloat16)):
            q, k, v = random_qkv(lengths, head_dim, batch=1, heads=(2, 1), dtype=dtype)
            exact, _ = reference(q, k, v, causal, head_dim**-0.5, torch.float32)
            for choice in choices(q, k, v, causal=causal):
                if choice.kernel in kinds:
                    out, _ = run_guarded(choice, q, k, v, causal=causal)
                    torch.testing.assert_close(out.float(), exact, atol=0.03, rtol=0.03)
                    launches[choice.kernel] += 1
    torch.cuda.synchronize()
    counts = ", ".join(f"{kind.value} {count}" for kind, count in launches.items())
    print(f"passed; launches: {counts}")


if __name__ == "__main__":
    main()
