"""From how many tokens an expert on the matrix unit (AMX) is faster than dot products, by turns in one process.

    python benchmarks/moe_amx.py [--rounds 9] [--seconds 40] [--threads N] --output FOLDER

Every expert has as many tokens. The ways are dot products, and the matrix unit for any number of tokens, asking for
the memory of the rows that come next in two orders and not at all. Layers are one that caches hold and one that they do
not. Writes moe_amx.json. `MOE_AMX_LEAST_TOKENS` and `MOE_AMX_FETCHES` of kernels/cpu/moe_amx.h are what this decides.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from provenance import provenance
from torch.nn import functional

from flashmoe_science.cpu.library import ELEMENT_TYPES, load_function
from flashmoe_science.cpu.moe import Problem
from flashmoe_science.jit.host import InstructionSet, require_instruction_set
from flashmoe_science.moe_arguments import ACTIVATION_CODES, Activation

TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
"""Of each expert."""
WAYS = {
    "dot products": None,
    "unit": {"MOE_AMX_LEAST_TOKENS": 1, "MOE_AMX_FETCHES": 2},
    "unit, asking as it multiplies": {"MOE_AMX_LEAST_TOKENS": 1, "MOE_AMX_FETCHES": 1},
    "unit, asking for nothing": {"MOE_AMX_LEAST_TOKENS": 1, "MOE_AMX_FETCHES": 0},
}
"""Macros of the kernel; None: the code for processors without the unit."""
TOLERANCE = 3e-2
"""Largest difference from the formula in float32, where results are about 1: so the call is the right one."""

Launch = Callable[..., int]


@dataclass(frozen=True)
class Layer:
    hidden: int
    intermediate: int
    experts: int
    w13: torch.Tensor
    w2: torch.Tensor


def make_layer(hidden: int, intermediate: int, experts: int) -> Layer:
    w13 = (torch.randn(experts, 2 * intermediate, hidden) * hidden**-0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, intermediate) * intermediate**-0.5).bfloat16()
    return Layer(hidden, intermediate, experts, w13, w2)


class Call:
    """A call of a layer whose experts have so many tokens each; its tensors live as long as it does."""

    def __init__(self, layer: Layer, each: int) -> None:
        tokens = layer.experts * each
        self.layer = layer
        self.hidden_states = torch.randn(tokens, layer.hidden).bfloat16()
        self.ids = (torch.arange(tokens, dtype=torch.int32) % layer.experts).view(-1, 1)
        self.weights = torch.ones(tokens, 1)
        self.out = torch.empty_like(self.hidden_states)
        self.problem = Problem(
            element_type=ELEMENT_TYPES[torch.bfloat16],
            tokens=tokens,
            hidden=layer.hidden,
            intermediate=layer.intermediate,
            experts=layer.experts,
            top_k=1,
            activation=ACTIVATION_CODES[Activation.SILU],
        )
        given = self.hidden_states, layer.w13, layer.w2, self.weights, self.ids, self.out
        threads = torch.get_num_threads()
        addresses = (tensor.data_ptr() for tensor in given)
        self.arguments = (ctypes.addressof(self.problem), *addresses, 0, 0, 0, 0, 0, threads)

    def seconds(self, launch: Launch) -> float:
        start = time.perf_counter()
        status = launch(*self.arguments)
        taken = time.perf_counter() - start
        assert status == 0
        return taken

    def check(self, name: str, launch: Launch) -> None:
        """Raises AssertionError unless the last expert's results are the formula's."""
        self.out.fill_(float("nan"))
        self.seconds(launch)
        rows = slice(self.layer.experts - 1, None, self.layer.experts)
        gate, up = functional.linear(self.hidden_states[rows].float(), self.layer.w13[-1].float()).chunk(
            2, -1
        )
        exact = functional.linear(functional.silu(gate) * up, self.layer.w2[-1].float())
        difference = float((self.out[rows].float() - exact).abs().max())
        assert self.out.isfinite().all(), name
        assert difference < TOLERANCE, f"{name}, {len(exact)} tokens: off by {difference}"


def measure(call: Call, launches: dict[str, Launch], rounds: int, deadline: float) -> dict[str, object]:
    """Milliseconds of each way, and the ratio of dot products' time to each other way's in a round; medians."""
    for name, launch in launches.items():
        call.check(name, launch)
    taken: dict[str, list[float]] = {name: [] for name in launches}
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() > deadline:
            break
        for name in random.sample(list(launches), len(launches)):
            taken[name].append(call.seconds(launches[name]))
    dot, *others = taken
    return {
        "rounds": len(taken[dot]),
        "ms": {name: round(statistics.median(each) * 1e3, 4) for name, each in taken.items()},
        "speed_up": {
            name: round(statistics.median(a / b for a, b in zip(taken[dot], taken[name], strict=True)), 3)
            for name in others
        },
    }


def compiled(with_unit: InstructionSet, further: dict[str, int]) -> dict[str, Launch]:
    """The kernel of each way, all compiled at once."""

    def load(macros: dict[str, int] | None) -> Launch:
        instruction_set = InstructionSet.AVX512_BF16 if macros is None else with_unit
        given = None if macros is None else {**macros, **further}
        return load_function("moe_forward", "flashmoe_moe_method", instruction_set, given)

    with ThreadPoolExecutor() as pool:
        return dict(zip(WAYS, pool.map(load, WAYS.values()), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=40, help="after these a case has three rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--emulated", action="store_true", help="loops in place of the unit: only to try the script"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with_unit = InstructionSet.AVX512_BF16 if arguments.emulated else InstructionSet.AMX
    require_instruction_set(with_unit)
    launches = compiled(with_unit, {"EMULATE_AMX": 1} if arguments.emulated else {})
    layers = {"cached": (512, 192, 16), "from memory": (2048, 768, 24)}
    cases = {}
    deadline = time.perf_counter() + arguments.seconds
    for kind, sizes in layers.items():
        layer = make_layer(*sizes)
        for each in TOKENS:
            case = measure(Call(layer, each), launches, arguments.rounds, deadline)
            cases[f"{kind}, {each} tokens an expert"] = case
            print(kind, each, case["ms"], case["speed_up"], flush=True)
    record = {
        **provenance("cpu"),
        "emulated": arguments.emulated,
        "threads": arguments.threads,
        "layers": {
            name: dict(zip(("hidden", "intermediate", "experts"), sizes, strict=True))
            for name, sizes in layers.items()
        },
        "cases": cases,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "moe_amx.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
