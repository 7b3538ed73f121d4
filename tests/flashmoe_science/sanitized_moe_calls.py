"""Run by tools/sanitize.sh under compute-sanitizer: mixtures of experts in every way that this GPU takes, and routing,
on small shapes.

Usage: python sanitized_moe_calls.py [WAY...]     (hopper, portable, ...; all if none is named)

Outputs and workspaces lie in guarded buffers, and each result is compared with float64, so that a kernel that does
nothing does not pass. The references are computed on the CPU: of PyTorch's products on the GPU some crash under
racecheck, even where it looks at no kernel. Prints "passed" when all calls were right; a wrong one raises.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_moe import assert_right, layer
from topk_reference import reference

from flashmoe_science.configs.moe.few import all_configurations
from flashmoe_science.cuda import launch
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device, device_of
from flashmoe_science.cuda.moe import MoeKind, few
from flashmoe_science.cuda.moe.problem import MoeProblem
from flashmoe_science.cuda.moe.select import module
from flashmoe_science.cuda.moe.topk import topk
from flashmoe_science.errors import InputError
from flashmoe_science.moe_arguments import Activation, Scores, W13Layout
from flashmoe_science.router_losses import OVERRIDE_VARIABLE, topk_routing_with_losses

# tokens, hidden, intermediate, experts, top_k: partial tiles, rows for more tiles than one, experts without rows.
LAYERS = [(1, 16, 16, 2, 1), (37, 80, 112, 5, 2), (300, 144, 48, 3, 2), (50, 272, 272, 70, 3)]
ROUTINGS = [(9, 8, 2), (5, 40, 6), (3, 300, 40)]


def launch_one_after_another() -> None:
    """Racecheck cannot follow a kernel that starts before its predecessor has ended. Waiting for it is then no wait."""
    with_overlap = launch.Launcher.__init__

    def without(self: launch.Launcher, *given: Any, dependent: bool = False, **options: Any) -> None:
        with_overlap(self, *given, dependent=False, **options)

    launch.Launcher.__init__ = without  # type: ignore[method-assign]


def choices(kind: MoeKind, problem: MoeProblem, where: Device) -> list[Choice]:
    """What is taken by the rule; of the ways for few tokens, which are kernels of their own, everything that can be."""
    chosen = module(kind).choose(problem, where)
    if chosen is None or kind is not MoeKind.FEW:
        return [] if chosen is None else [chosen]
    possible = [chosen]
    for configuration in all_configurations(where.architecture):
        try:
            few.check(problem, configuration)
        except InputError:
            continue
        possible.append(replace(chosen, configuration=configuration))
    return list(dict.fromkeys(possible))


def route_with_losses(logits: torch.Tensor, k: int) -> None:
    """The choice, its losses and their gradient against the composition: by kernels, whatever the environment says."""
    os.environ[OVERRIDE_VARIABLE] = "fused"
    results = []
    for given in (logits, logits.cpu()):
        leaf = given.detach().clone().requires_grad_()
        weights, ids, losses = topk_routing_with_losses(leaf, k)
        numbers = (weights, losses.load_balancing, losses.z)
        steps = torch.linspace(1, 2, weights.numel(), device=leaf.device).view_as(weights)
        loss = (weights * steps).sum() + 3 * losses.load_balancing + 5 * losses.z
        (gradient,) = torch.autograd.grad(loss, leaf)
        results.append([*(each.detach().cpu() for each in numbers), gradient.cpu()])
        results[-1] += [ids.long().cpu(), losses.tokens_per_expert.cpu()]
    for ours, composed in zip(*results, strict=True):
        torch.testing.assert_close(ours, composed, rtol=1e-4, atol=1e-5)


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
            biased=index % 2 == 1,
        )
        for name in names:
            for choice in choices(MoeKind(name), given.problem, where):
                assert_right(given, [choice], against="cpu")
                launches[name] += 1
    for tokens, experts, k in ROUTINGS:
        logits = torch.randn(tokens, experts, device="cuda")
        weights, ids = topk(logits, k)
        exact, exact_ids = reference(logits.cpu(), k, Scores.SOFTMAX, True, None, 1.0)
        assert torch.equal(ids.long().cpu(), exact_ids)
        torch.testing.assert_close(weights.double().cpu(), exact, rtol=2e-6, atol=1e-30)
        route_with_losses(logits, k)
    torch.cuda.synchronize()
    print(f"passed; launches: {', '.join(f'{name} {count}' for name, count in launches.items())}")


if __name__ == "__main__":
    main()
