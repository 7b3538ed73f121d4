"""Run by tools/sanitize.sh under compute-sanitizer: gradients of attention by every kernel that takes a call, and of
sinks, on small shapes.

Usage: python sanitized_backward_calls.py [KERNEL...]     (of `GradientKind`; all that this GPU has if none is named)

SANITIZER in the environment names the tool. Each gradient is held against float64 on the CPU, so that a kernel that
does nothing does not pass. Prints "passed" when all calls were right; a wrong one raises.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from attention_backward import Backward, assert_gradients, backward_case
from sanitized_kernels import compile_for_racecheck

from flashmoe_science.configs.attention import backward as portable_configs
from flashmoe_science.configs.attention.backward_hopper import HopperBackward
from flashmoe_science.configs.attention.backward_short import ShortBackward
from flashmoe_science.cuda.attention.gradients import portable, wgmma
from flashmoe_science.cuda.attention.gradients.backward import _problem, backward
from flashmoe_science.cuda.attention.gradients.problem import GradientKind
from flashmoe_science.cuda.attention.gradients.select import BACKWARD
from flashmoe_science.cuda.attention.problem import strides_of
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import device_of
from flashmoe_science.gradients import Gradients, Needs
from flashmoe_science.varlen import sink_gradients

# (seqlen_q, seqlen_k), head_dim, causal, a gradient of the log-sum-exp: partial tiles, several blocks of either, rows
# without keys, padded head dims, and those for which one pass has no room.
CALLS = [
    ((1, 1), 64, False, False),
    ((70, 129), 64, True, True),
    ((150, 40), 72, True, False),
    ((40, 150), 128, True, False),
    ((65, 130), 256, False, True),
    ((130, 70), 200, True, False),
]
ALL = Needs(True, True, True)
LONG = [
    ((170, 300), 128, False, True),
    ((300, 130), 120, True, False),
    ((130, 420), 128, False, False),
    ((200, 450), 128, True, True, (70, -1)),
    ((300, 200), 64, True, False, (100, -1)),
]
"""Of the Hopper kernel's tiles for more keys than are checked here, with `LONG_TILES`."""
LONG_TILES = [
    HopperBackward(128, False, wide=True),
    HopperBackward(128, True, wide=True),
    HopperBackward(128, False, staggered=True),
    *(HopperBackward(head_dim, True, converts=True, window=True) for head_dim in (128, 64)),
]
DRAWN = [
    (LONG[0], LONG_TILES[0]),
    (CALLS[1], HopperBackward(64, True, converts=True)),
    (LONG[3], LONG_TILES[3]),
]
"""Of the Hopper kernel on a stream of another priority, where blocks draw their first tile as well."""
FEATURES = [
    ((150, 170), 64, False, True, (40, 20), 0.0),
    ((130, 70), 128, True, False, (30, -1), 4.0),
    ((65, 130), 256, False, True, (-1, 25), 0.0),
    ((70, 129), 72, True, False, (-1, -1), 5.0),
]
"""Of the portable kernels: a window, a cap, and both."""
MANY_HEADS = [((70, 130), 64, False, True), ((33, 40), 64, True, False)]
"""Of the kernel for short sequences, whose blocks then have three heads of keys."""
SINKS = [(1, 1, 1, 64), (2, 3, 150, 72), (1, 4, 300, 128), (150, 1, 20, 8)]
"""Shapes of an output with sinks: rows past the end, padded rows, several blocks of a head."""
NEEDS = [ALL, ALL, Needs(True, False, False), ALL, ALL, Needs(False, True, True)]


def made(
    lengths: tuple[int, int],
    head_dim: int,
    causal: bool,
    with_lse: bool,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    dtype: torch.dtype,
    batch: int = 1,
) -> Backward:
    """A call on the CPU, with what is right."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)

    def normal(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(batch, heads, rows, head_dim, generator=generator).to(dtype)

    seqlen_q, seqlen_k = lengths
    return backward_case(
        normal(4, seqlen_q),
        normal(2, seqlen_k),
        normal(2, seqlen_k),
        normal(4, seqlen_q),
        causal=causal,
        grad_lse=torch.randn(batch, 4, seqlen_q, generator=generator) if with_lse else None,
        window=window,
        softcap=softcap,
    )


def choose(case: Backward, needs: Needs, kind: GradientKind) -> Choice | None:
    tensors = (case.query, case.key, case.value, case.output)
    strides = strides_of("grad_output", case.grad_output)
    problem = _problem(
        tensors, strides, case.causal, case.scale, needs, window=case.window, softcap=case.softcap
    )
    return BACKWARD.modules[kind].choose(problem, device_of(torch.cuda.current_device()))


def differentiate(case: Backward, needs: Needs, choice: Choice) -> Gradients:
    grad_lse = None if case.grad_lse is None else case.grad_lse.cuda()
    tensors = (case.grad_output, case.query, case.key, case.value, case.output, case.lse)
    on_gpu = [tensor.cuda() for tensor in tensors]
    return backward(
        *(*on_gpu, grad_lse),
        causal=case.causal,
        softmax_scale=case.scale,
        needs=needs,
        window=case.window,
        softcap=case.softcap,
        choice=choice,
    )


def assert_right(case: Backward, needs: Needs, choice: Choice) -> None:
    gradients = differentiate(case, needs, choice)
    assert [each is not None for each in gradients] == list(needs)
    on_cpu = [None if each is None else each.cpu() for each in gradients]
    assert_gradients(replace(case, grad_lse=None), tuple(on_cpu))


def assert_sinks_right(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """What sinks change of a backward pass, and their gradient."""
    generator = torch.Generator().manual_seed(sum(shape))
    batch, heads, rows, head_dim = shape
    output, grad_output = (
        torch.randn(batch, rows, heads, head_dim, generator=generator).to(dtype).transpose(1, 2)
        for _ in range(2)
    )
    lse, grad_lse = (torch.randn(batch, heads, rows, generator=generator) for _ in range(2))
    lse[:, :, 5::7] = -torch.inf
    call = {
        "grad_output": grad_output,
        "grad_lse": grad_lse,
        "output": output,
        "lse": lse,
        "sinks": torch.randn(heads, generator=generator),
    }
    on_gpu = {name: each.cuda() for name, each in call.items()}
    results = sink_gradients.with_sinks(**on_gpu, total=True, of_sinks=True)[1:]
    wide = {name: each.double() for name, each in call.items()}
    exact = sink_gradients.with_sinks(**wide, total=True, of_sinks=True)[1:]  # composed, on the CPU
    for mine, right in zip(results, exact, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine.double().cpu(), right, rtol=1e-5, atol=1e-3)


def main() -> None:
    compile_for_racecheck((wgmma, "kernel"), (portable, "_kernel"))
    torch.zeros((), device="cuda")
    kinds = [GradientKind(name) for name in sys.argv[1:]] or list(GradientKind)
    launches: Counter[str] = Counter()
    for index, (given, needs) in enumerate(zip(CALLS, NEEDS, strict=True)):
        case = made(*given, dtype=(torch.bfloat16, torch.float16)[index % 2])
        for kind in kinds:
            choice = choose(case, needs, kind)
            if choice is None:
                continue
            assert_right(case, needs, choice)
            launches[kind.value] += 1
            if kind is GradientKind.PORTABLE:
                other = portable_configs.configuration(
                    device_of(torch.cuda.current_device()).architecture, given[1]
                )
                passes = other if choice.configuration.single is None else replace(other, single=None)
                if passes != choice.configuration:
                    assert_right(case, needs, replace(choice, configuration=passes))
                    launches["portable, the other number of passes"] += 1
    if launches[GradientKind.HOPPER.value]:
        for given, tile in zip(LONG, LONG_TILES, strict=True):
            assert_right(made(*given, dtype=torch.bfloat16), ALL, Choice(GradientKind.HOPPER, tile, ""))
            launches["hopper, long"] += 1
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            for given, tile in DRAWN:
                assert_right(made(*given, dtype=torch.bfloat16), ALL, Choice(GradientKind.HOPPER, tile, ""))
                launches["hopper, first tiles drawn"] += 1
    if GradientKind.PORTABLE in kinds:
        for index, given in enumerate(FEATURES):
            case = made(*given, dtype=(torch.bfloat16, torch.float16)[index % 2])
            choice = choose(case, ALL, GradientKind.PORTABLE)
            if choice is not None:
                assert_right(case, ALL, choice)
                launches["portable, windows and caps"] += 1
    if launches[GradientKind.SHORT.value]:
        heads = 2 * device_of(torch.cuda.current_device()).multiprocessors + 2
        for given in MANY_HEADS:
            case = made(*given, dtype=torch.bfloat16, batch=-(-heads // 2))
            assert_right(case, ALL, Choice(GradientKind.SHORT, ShortBackward(case.causal)))
            launches["short, several heads of a block"] += 1
    if not sys.argv[1:]:
        for index, shape in enumerate(SINKS):
            assert_sinks_right(shape, (torch.bfloat16, torch.float16)[index % 2])
            launches["sinks"] += 1
    torch.cuda.synchronize()
    assert launches
    print(f"passed; launches: {', '.join(f'{name} {count}' for name, count in launches.items())}")


if __name__ == "__main__":
    main()
