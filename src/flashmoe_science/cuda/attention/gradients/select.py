"""Which kernel a call of attention backward takes: the one place where that is decided."""

from __future__ import annotations

from flashmoe_science.configs.attention import backward_short
from flashmoe_science.cuda.attention.gradients import hopper, portable, short, two_pass
from flashmoe_science.cuda.attention.gradients.problem import BackwardProblem, GradientKind
from flashmoe_science.cuda.choice import Selection
from flashmoe_science.cuda.device import Device

OVERRIDE_VARIABLE = "FLASHMOE_CUDA_BACKWARD"
_PREFERENCE = (GradientKind.SHORT, GradientKind.HOPPER, GradientKind.TWO_PASS, GradientKind.PORTABLE)
_PREFERENCE_FOR_OTHERS = (
    GradientKind.HOPPER,
    GradientKind.TWO_PASS,
    GradientKind.SHORT,
    GradientKind.PORTABLE,
)


def _preference(problem: BackwardProblem, device: Device) -> tuple[GradientKind, ...]:
    pays = backward_short.pays(
        heads=problem.batch * problem.num_kv_heads,
        seqlen_k=problem.seqlen_k,
        multiprocessors=device.multiprocessors,
    )
    return _PREFERENCE if pays else _PREFERENCE_FOR_OTHERS


BACKWARD = Selection[BackwardProblem](
    modules={
        GradientKind.SHORT: short,
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
    preference=_preference,
)
select, plan, kernels = BACKWARD.select, BACKWARD.plan, BACKWARD.kernels
