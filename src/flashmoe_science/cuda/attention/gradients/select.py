"""Which kernel a call of attention backward takes: the one place where that is decided."""

from __future__ import annotations

from flashmoe_science.cuda.attention.gradients import hopper, portable, two_pass
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.choice import Selection

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_BACKWARD"
BACKWARD = Selection[BackwardProblem](
    modules={
        GradientKind.HOPPER: hopper,
        GradientKind.TWO_PASS: two_pass,
        GradientKind.PORTABLE: portable,
    },
    override_variable=OVERRIDE_VARIABLE,
    noun="CUDA kernel of the backward pass",
    describe=lambda problem: (
        f"{problem.dtype} with head_dim {problem.head_dim}"
        + ("" if problem.is_plain else ", with a window or a cap")
    ),
    instead="float16, or torch's scaled_dot_product_attention",
)
select, plan, kernels = BACKWARD.select, BACKWARD.plan, BACKWARD.kernels
