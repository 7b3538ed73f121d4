"""Which way a call of the backward pass of a mixture of experts takes: the one place where that is decided."""

from __future__ import annotations

from flashmoe_science.cuda.choice import Selection
from flashmoe_science.cuda.moe.gradients import hopper, portable
from flashmoe_science.cuda.moe.gradients.problem import (
    OVERRIDE_VARIABLE,
    MoeBackwardKind,
    MoeBackwardProblem,
)

BACKWARD = Selection[MoeBackwardProblem](
    modules={MoeBackwardKind.HOPPER: hopper, MoeBackwardKind.PORTABLE: portable},
    override_variable=OVERRIDE_VARIABLE,
    noun="mixture-of-experts kernel of the backward pass",
    describe=lambda problem: (
        f"{problem.forward.dtype} with {problem.forward.experts} experts, hidden size {problem.forward.hidden} and "
        f"intermediate size {problem.forward.intermediate}"
    ),
    instead="torch.nn.functional.grouped_mm",
)
select, plan, kernels = BACKWARD.select, BACKWARD.plan, BACKWARD.kernels
