"""Run by tools/sanitize.sh under compute-sanitizer: gradients of a mixture of experts, on small shapes.

Each gradient is held against the composition in float64 on the CPU, so that a kernel that does nothing does not pass.
Those of Hopper run there alone, the portable ones everywhere. Prints "passed" when all calls were right; a wrong one
raises.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from moe_reference import Moe, make_moe
from sanitized_moe_calls import launch_one_after_another

from flashmoe_science.configs.moe import backward_portable
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.cuda.moe.gradients import MoeBackwardKind, backward, forward_keeping
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_composition import backward as composed_backward
from flashmoe_science.moe_gradients import MainGradients, MoeNeeds, MoeTensors

ALL = MoeNeeds(hidden_states=True, w13=True, w2=True, topk_weights=True)
IN_PAIRS = (1100, 272, 144, 2, 1)
"""So many rows of an expert that Hopper's blocks share weights in pairs."""
NAMES = ("hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias")


def without_wgmma() -> Choice:
    tiles = backward_portable.configuration(device_of(torch.cuda.current_device()).architecture)
    return Choice(MoeBackwardKind.PORTABLE, tiles, "asked for")


# tokens, hidden, intermediate, experts, top_k: partial tiles, more than one tile of rows, an expert without rows.
def check(
    *sizes: int,
    dtype: torch.dtype = torch.bfloat16,
    activation: Activation = Activation.SILU,
    layout: W13Layout = W13Layout.CONCAT,
    biased: bool = False,
    kept: bool = True,
    main: bool = False,
    portable: bool = False,
) -> None:
    """One layer, forward and backward.

    kept: z is kept by the forward pass, not computed again. main: gradients of the weights are added to buffers.
    portable: by the kernels without wgmma, for which nothing is kept.
    """
    kept = kept and not portable
    moe = make_moe(*sizes, dtype=dtype, activation=activation, biased=biased, ids=torch.int64)
    moe.topk_ids[moe.topk_ids == 1] = -1
    given = Moe(*(each.cuda() for each in moe.tensors), **{n: each.cuda() for n, each in moe.biases.items()})
    options = {"activation": activation, "w13_layout": layout}
    z = forward_keeping(*given.tensors, **options, **given.biases)[1] if kept else None
    generator = torch.Generator().manual_seed(1)
    incoming = torch.randn(moe.hidden_states.shape, generator=generator).to(dtype)
    needs = ALL._replace(w13_bias=biased, w2_bias=biased)
    buffers = (
        MainGradients(*(torch.ones(w.shape, device="cuda") for w in (given.w13, given.w2))) if main else None
    )
    gradients = backward(
        *(incoming.cuda(), *given.tensors, z),
        **{**options, **given.biases, "needs": needs, "main": buffers},
        choice=without_wgmma() if portable else None,
    )
    ours = dict(zip(NAMES, gradients, strict=True))
    if buffers is not None:
        assert ours["w13"] is None
        assert ours["w2"] is None
        ours |= {"w13": buffers.w13 - 1, "w2": buffers.w2 - 1}
    exact = {name: getattr(moe, name).double() for name in NAMES[:4]}
    biases = [moe.biases[name].double() if biased else None for name in NAMES[4:]]
    right = composed_backward(
        incoming.double(),
        MoeTensors(*exact.values(), moe.topk_ids, *biases),
        None,
        **options,
        needs=needs,
    )
    for name, true in zip(NAMES, right, strict=True):
        if true is not None:
            error = (ours[name].cpu().double() - true).norm() / true.norm()
            assert error < 2 * torch.finfo(dtype).eps, (sizes, name, float(error))


def main() -> None:
    launch_one_after_another()
    interleaved = W13Layout.INTERLEAVED
    ways = (False, True) if torch.cuda.get_device_capability() == (9, 0) else (True,)
    for way in ways:
        check(1, 16, 16, 2, 1, portable=way)
        check(
            70,
            80,
            112,
            5,
            2,
            activation=Activation.GELU,
            layout=interleaved,
            dtype=torch.float16,
            portable=way,
        )
        check(150, 144, 80, 5, 2, activation=Activation.SWIGLU_OAI, biased=True, portable=way)
        check(200, 272, 144, 3, 1, activation=Activation.RELU2_NO_MUL, kept=False, portable=way)
        check(100, 128, 96, 4, 2, main=True, portable=way)
        check(*IN_PAIRS, kept=True, portable=way)
        check(*IN_PAIRS, activation=Activation.SWIGLU_OAI, biased=True, kept=False, portable=way)
    torch.cuda.synchronize()
    print(f"passed; layers: {7 * len(ways)}")


if __name__ == "__main__":
    main()
