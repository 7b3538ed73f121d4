"""One layer of a mixture of experts: routing, then the experts of each token.

python examples/experts.py [--device cuda]
"""

from __future__ import annotations

import argparse

import torch

from flashmoe_science import fused_moe, topk_routing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    tokens, hidden, intermediate, experts, chosen = 16, 256, 128, 8, 2
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden_states = tensor(tokens, hidden).bfloat16()
    w13 = (tensor(experts, 2 * intermediate, hidden) / hidden**0.5).bfloat16()  # gate and up
    w2 = (tensor(experts, hidden, intermediate) / intermediate**0.5).bfloat16()  # down
    weights, ids = topk_routing(tensor(tokens, experts), k=chosen)
    output = fused_moe(hidden_states, w13, w2, weights, ids)
    print(f"output {tuple(output.shape)}; token 0 went to the experts {ids[0].tolist()}")


if __name__ == "__main__":
    main()
