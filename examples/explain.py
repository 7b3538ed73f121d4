"""Which kernel a call takes and why not another: here, and on a GPU that need not be present.

python examples/explain.py
"""

from __future__ import annotations

import torch

from flashmoe_science import explain, flash_attention


def main() -> None:
    query = torch.empty(1, 16, 2048, 64, dtype=torch.bfloat16)
    key = value = torch.empty(1, 4, 2048, 64, dtype=torch.bfloat16)
    print(explain(flash_attention, query, key, value, causal=True))
    print()
    print(explain(flash_attention, query, key, value, causal=True, gpu="H200"))


if __name__ == "__main__":
    main()
