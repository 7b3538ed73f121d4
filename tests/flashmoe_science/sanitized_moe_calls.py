"""Run by tools/sanitize.sh under compute-sanitizer: mixtures of experts in every way that this GPU takes, and routing,
on small shapes.

Usage: python sanitized_moe_calls.py [WAY...]     (hopper, portable, ...; all if none is named)

Outputs and workspaces lie in guarded buffers, and each result is compared with float64, so that a kernel that does
nothing does not pass. The references are computed on the CPU: of PyTorch's products on the GPU some crash under
racecheck, even where it looks at no kernel. Prints "passed" when all calls were right; a wrong one raises.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_moe import assert_right, layer
from topk_reference import reference

from flashmoe_science.cuda import launch
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.moe import MoeKind
from flashmoe_science.cuda.moe.select import module
from flashmoe_science.cuda.moe.topk import topk
from flashmoe_science.moe_arguments import Activation, Scores, W13Layout

# tokens, hidden, intermediate, experts, top_k: partial tiles, rows for more tiles than one, experts without rows.
LAYERS = [(1, 16, 16, 2, 1), (37, 80, 112, 5, 2), (300, 144, 48, 3, 2), (50, 272, 272, 70, 3)]
ROUTINGS = [(9, 8, 2), (5, 40, 6), (3, 300, 40)]


def launch_one_after_another() -> None:
    """Racecheck cannot follow a kernel that starts before its predecessor has ended. Waiting for it is then no wait."""
    with_overlap = launch.Launcher.__init__

    def without(self: launch.Launcher, *given: Any, dependent: bool = False, **options: Any) -> None:
        with_overlap(self, *given, dependent=False, **options)

    launch.Launcher.__init__ = without  # type: ignore[method-assign]


def main() -> None:
    launch_one_after_another()
    names = sys.argv[1:] or [kind.value for kind in MoeKind]
    where = device_of(torch.cuda.current_device())
    launches = dict.fromkeys(names, 0)
    for index, shape in enumerate(LAYERS):
        torch.manual_seed(index)
        tokens, _, _, experts, top_k = shape
        ids = torch.stack([torch.randperm(experts + 1)[:top_k] for _ in range(tokens)])
        given = layer(
            *shape,
            ids=ids if index % 2 else ids.int(),
            dtype=(torch.bfloat16, torch.float16)[index % 2],
            activation=(Activation.SILU, Activation.GELU_NO_MUL)[index // 2],
            w13_layout=(W13Layout.CONCAT, W13Layout.INTERLEAVED)[index % 2],
        )
        for name in names:
            choice = module(MoeKind(name)).choose(given.problem, where)
            if choice is not None:
                assert_right(given, [choice], against="cpu")
                launches[name] += 1
    for tokens, experts, k in ROUTINGS:
        logits = torch.randn(tokens, experts, device="cuda")
        weights, ids = topk(logits, k)
        exact, exact_ids = reference(logits.cpu(), k, Scores.SOFTMAX, True, None, 1.0)
        assert torch.equal(ids.long().cpu(), exact_ids)
        torch.testing.assert_close(weights.double().cpu(), exact, rtol=2e-6, atol=1e-30)
    torch.cuda.synchronize()
    print(f"passed; launches: {', '.join(f'{name} {count}' for name, count in launches.items())}")


if __name__ == "__main__":
    main()
