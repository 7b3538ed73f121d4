"""GPU time of the passes of a mixture of experts on Hopper, and of what each gradient adds to the backward pass.

    python benchmarks/moe_products.py [--output products.json] [--case qwen3-30b-32768 ...] [--calls 8]

For cases of the suite moe-step, milliseconds: the forward pass that keeps its projections (`forward`), the backward
pass for the routing weights alone, which is sorting and the first product (`first`), for one gradient more (`input`,
`w2`, `w13`: what it takes beyond `first`), and whole (`all`). Events around calls launched ahead, medians. Versions are
compared by processes in turns, each with its own sources on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from provenance import provenance

from cudadent42.operations.moe_backward.case import MoeBackwardCase
from cudadent42.operations.moe_backward.inputs import MoeGradientInputs, input_sets
from cudadent42.suites.loader import load_suite
from flashmoe_science.cuda.moe.gradients import backward, forward_keeping
from flashmoe_science.moe_arguments import Activation, W13Layout
from flashmoe_science.moe_gradients import MoeNeeds

NOTHING = MoeNeeds(hidden_states=False, w13=False, w2=False, topk_weights=False)
FIRST = NOTHING._replace(topk_weights=True)
GRADIENTS = {
    "input": NOTHING._replace(hidden_states=True),
    "w2": NOTHING._replace(w2=True),
    "w13": NOTHING._replace(w13=True),
}
ALL = MoeNeeds(hidden_states=True, w13=True, w2=True, topk_weights=True)
AHEAD_CYCLES = 200_000
"""The GPU waits so long before each call, while the host launches it."""
WARM_UP = 2


def main() -> None:
    suite = load_suite("moe-step")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", nargs="+", choices=[case.name for case in suite.shapes])
    parser.add_argument("--calls", type=int, default=8)
    chosen = parser.parse_args()
    rows = []
    for case in suite.shapes:
        assert isinstance(case, MoeBackwardCase)
        if chosen.case and case.name not in chosen.case:
            continue
        (inputs,) = input_sets(case, 0, 1, "cuda:0")
        rows.append({"case": case.name, **measured(case, inputs, chosen.calls)})
        print(rows[-1], flush=True)
    if chosen.output is not None:
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        document = {**provenance("cuda"), "cases": rows}
        chosen.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measured(case: MoeBackwardCase, inputs: MoeGradientInputs, calls: int) -> dict[str, float]:
    """Milliseconds."""
    tensors = inputs.forward.tensors
    options = {"activation": Activation(case.activation), "w13_layout": W13Layout(case.w13_layout)}
    _, z = forward_keeping(*tensors, **options)

    def differentiate(needs: MoeNeeds) -> None:
        backward(inputs.output_gradient, *tensors, z, needs=needs, **options)

    first = median_of(partial(differentiate, FIRST), calls)
    added = {
        name: median_of(partial(differentiate, needs), calls) - first for name, needs in GRADIENTS.items()
    }
    times = {
        "forward": median_of(partial(forward_keeping, *tensors, **options), calls),
        "first": first,
        **added,
        "all": median_of(partial(differentiate, ALL), calls),
    }
    return {name: round(milliseconds, 4) for name, milliseconds in times.items()}


def median_of(call: Callable[[], object], calls: int) -> float:
    """Milliseconds of a call's launches."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    events = []
    for _ in range(calls):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


if __name__ == "__main__":
    main()
