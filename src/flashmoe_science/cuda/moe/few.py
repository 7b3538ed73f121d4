"""The way through a mixture of experts for few tokens (`kernels/cuda/moe_few_*.cu`), sm_80 and later: configurations
and launches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from flashmoe_science.configs.moe import few as configs
from flashmoe_science.configs.moe.few import FewConfiguration, FewProduct, FewWay
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import ADDRESSES, Launcher, LaunchPlan, loaded, type_macros
from flashmoe_science.cuda.moe import combine
from flashmoe_science.cuda.moe.combine import Combine
from flashmoe_science.cuda.moe.problem import MoeKind, MoeProblem, addresses_of_biases
from flashmoe_science.cuda.workspace import aligned
from flashmoe_science.errors import InputError
from flashmoe_science.jit.limits import overlaps
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.moe_arguments import ACTIVATION_CODES, Activation, W13Layout

_REST = struct.Struct("=Q4I10i")  # the fields of the kernels' `Parameters` after the addresses
ARGUMENT_BYTES = ADDRESSES.size + _REST.size
_BIAS = struct.Struct("=Q3i")  # behind them, where the product has a bias: its address, then how it lies
BIASED_ARGUMENT_BYTES = ARGUMENT_BYTES + _BIAS.size + 4  # to a multiple of 8
_ADDRESS = struct.Struct("Q")
_Start = Callable[[int, int, int, int, int, int, int], None]
"""Of (input, weights, topk_weights, topk_ids, output, bias, stream); bias is 0 where there is none."""
_DTYPES = (torch.bfloat16, torch.float16)


class Product(Enum):
    """The two products of an expert."""

    UP = "up"
    """Tokens times w13, activated."""
    DOWN = "down"
    """Intermediate values times w2."""


def choose(problem: MoeProblem, device: Device) -> Choice | None:
    """The configuration, while so few tokens meet an expert that its weights' way from memory is what takes time."""
    if why_not(problem, device) is not None:
        return None
    configuration = configs.configuration(device.architecture, problem.tokens, problem.top_k, problem.experts)
    rows = f"{problem.rows_per_expert:.2g} rows per expert"
    return Choice(MoeKind.FEW, configuration, f"each weight is read once, at memory's rate: {rows}")


def why_not(problem: MoeProblem, device: Device) -> str | None:
    if problem.keeps:
        return "it keeps nothing for a backward pass"
    if device.architecture not in configs.tuned_architectures():
        return f"there are no tiles for {device.architecture}"
    configuration = configs.configuration(device.architecture, problem.tokens, problem.top_k, problem.experts)
    if configuration is None:
        return f"{problem.rows_per_expert:.2g} rows per expert are not few"
    if not _countable(problem, configuration):
        return "its counters cannot hold so many rows, experts or bytes of an expert"
    return None


def kernels(architecture: str) -> list[CudaKernel]:
    """Both products of every configuration, for all activations and types; none before sm_80."""
    by_label = {}
    for configuration in configs.all_configurations(architecture):
        for dtype in _DTYPES:
            built = [
                kernel(configuration, Product.UP, activation, dtype, architecture)
                for activation in Activation
            ]
            built.append(kernel(configuration, Product.DOWN, Activation.SILU, dtype, architecture))
            # Biases are those of GPT-OSS; with other activations they compile at their first call.
            built += [
                kernel(configuration, product, Activation.SWIGLU_OAI, dtype, architecture, biased=True)
                for product in Product
            ]
            by_label.update({one.label: one for one in built})
    return [*by_label.values(), *(combine.step_kernels(architecture) if by_label else ())]


def check(problem: MoeProblem, configuration: Any) -> None:
    if not isinstance(configuration, FewConfiguration):
        raise InputError(f"the way for few tokens takes a FewConfiguration, not {configuration!r}")
    if configuration.direct and FewWay.TILES in (configuration.up.way, configuration.down.way):
        raise InputError(
            f"({configuration.label}): rows of one's own need sorted slots; take another way or direct=False"
        )
    if configuration.up.way is FewWay.COMBINED:
        raise InputError(
            f"({configuration.label}): the first product cannot combine; take another way for it"
        )
    if not _countable(problem, configuration):
        most = _most_slots(configuration)
        raise InputError(
            f"tokens * k is {problem.slots} with {problem.experts} experts; expected at most {most} with "
            f"{configs.MAX_EXPERTS} for ({configuration.label}): choose again"
        )


def plan(
    problem: MoeProblem, configuration: Any, device: Device, *, allow_defects: bool = False
) -> LaunchPlan:
    check(problem, configuration)
    if problem.biases:
        return _plan_with_biases(problem, configuration, device, allow_defects=allow_defects)
    up = product_launcher(problem, configuration, Product.UP, device, allow_defects=allow_defects).start_at
    down = product_launcher(
        problem, configuration, Product.DOWN, device, allow_defects=allow_defects
    ).start_at
    intermediate_bytes = _intermediate_bytes(problem)
    if configuration.combined:

        def launch_combined(
            x: int, w13: int, w2: int, weights: int, ids: int, output: int, workspace: int, stream: int
        ) -> None:
            up(x, w13, weights, ids, workspace, stream)
            down(workspace, w2, weights, ids, output, stream)

        return LaunchPlan(launch_combined, intermediate_bytes)

    add = Combine(problem, device, device.architecture).launch

    def launch_by_slots(
        x: int, w13: int, w2: int, weights: int, ids: int, output: int, workspace: int, stream: int
    ) -> None:
        rows = workspace + intermediate_bytes
        up(x, w13, weights, ids, workspace, stream)
        down(workspace, w2, weights, ids, rows, stream)
        add(rows, weights, ids, output, stream)

    return LaunchPlan(launch_by_slots, intermediate_bytes + _rows_bytes(problem))


def _plan_with_biases(
    problem: MoeProblem, configuration: FewConfiguration, device: Device, *, allow_defects: bool
) -> LaunchPlan:
    up = _start(problem, configuration, Product.UP, device, allow_defects=allow_defects)
    down = _start(problem, configuration, Product.DOWN, device, allow_defects=allow_defects)
    add = None if configuration.combined else Combine(problem, device, device.architecture).launch
    every = addresses_of_biases(problem) or (lambda rest: (0, 0, *rest))
    intermediate_bytes = _intermediate_bytes(problem)

    def launch(x: int, w13: int, w2: int, weights: int, ids: int, *rest: int) -> None:
        w13_bias, w2_bias, output, workspace, stream = every(rest)
        rows = output if add is None else workspace + intermediate_bytes
        up(x, w13, weights, ids, workspace, w13_bias, stream)
        down(workspace, w2, weights, ids, rows, w2_bias, stream)
        if add is not None:
            add(rows, weights, ids, output, stream)

    return LaunchPlan(launch, intermediate_bytes + (0 if add is None else _rows_bytes(problem)))


def _start(
    problem: MoeProblem,
    configuration: FewConfiguration,
    product: Product,
    device: Device,
    *,
    allow_defects: bool,
) -> _Start:
    launcher = product_launcher(problem, configuration, product, device, allow_defects=allow_defects)
    start = launcher.start_at
    if not _is_biased(problem, product):
        return lambda x, weights, topk_weights, ids, output, bias, stream: start(
            x, weights, topk_weights, ids, output, stream
        )
    buffer = launcher.buffer

    def start_with_bias(
        x: int, weights: int, topk_weights: int, ids: int, output: int, bias: int, stream: int
    ) -> None:
        _ADDRESS.pack_into(buffer, ARGUMENT_BYTES, bias)
        start(x, weights, topk_weights, ids, output, stream)

    return start_with_bias


def _intermediate_bytes(problem: MoeProblem) -> int:
    return aligned(problem.slots * problem.intermediate * problem.dtype.itemsize)


def _rows_bytes(problem: MoeProblem) -> int:
    return problem.slots * problem.hidden * problem.dtype.itemsize


def _is_biased(problem: MoeProblem, product: Product) -> bool:
    return problem.w13_biased if product is Product.UP else problem.w2_biased


def kernel(
    configuration: FewConfiguration,
    product: Product,
    activation: Activation,
    dtype: torch.dtype,
    architecture: str,
    *,
    biased: bool = False,
) -> CudaKernel:
    """One product in one configuration, which may be another architecture's."""
    up = product is Product.UP
    tile = _tile(configuration, product)
    name = f"moe_few_{tile.way.value}"
    own = {"PARTS": tile.parts} if tile.way is FewWay.COMBINED else {"SECOND": int(not up)}
    return CudaKernel(
        source=f"{name}.cu",
        function=name,
        architecture=architecture,
        macros={
            "WARPS": tile.warps,
            "M_TILES": tile.m_tiles,
            "N_TILES": tile.n_tiles,
            "K_STEPS": tile.k_steps,
            "STAGES": tile.stages,
            "MAX_SLOTS": configuration.max_slots,
            "DIRECT": int(configuration.direct),
            **own,
            **({"BIASED": 1} if biased else {}),
            "ACTIVATION": ACTIVATION_CODES[activation] if up else 0,
            "DEPENDENT": int(overlaps(architecture)),
            **type_macros(dtype),
        },
        threads_per_block=tile.threads,
        dynamic_shared_bytes=configuration.shared_bytes(tile),
    )


def product_launcher(
    problem: MoeProblem,
    configuration: FewConfiguration,
    product: Product,
    device: Device,
    *,
    allow_defects: bool = False,
) -> Launcher:
    """One product, ready but for a bias: `start_at(input, weights, topk_weights, topk_ids, output, stream)`."""
    biased = _is_biased(problem, product)
    compiled = kernel(
        configuration, product, problem.activation, problem.dtype, device.architecture, biased=biased
    )
    grid = (blocks(problem, configuration, product, device), 1, 1)
    # Early starts are safe although the second product reads ids and weights before it waits for the first: that lets
    # its successor start only after it has itself waited, for all that wrote them.
    launcher = loaded(
        compiled,
        device,
        grid,
        BIASED_ARGUMENT_BYTES if biased else ARGUMENT_BYTES,
        dependent=bool(compiled.macros["DEPENDENT"]),
        allow_defects=allow_defects,
    )
    write_arguments(launcher.buffer, problem, configuration, product)
    return launcher


def blocks(problem: MoeProblem, configuration: FewConfiguration, product: Product, device: Device) -> int:
    """One on every multiprocessor, or as many as there can be units of work."""
    slabs = _slabs(problem, configuration, product)
    if _tile(configuration, product).way is FewWay.COMBINED:
        return min(device.multiprocessors, slabs)
    return min(device.multiprocessors, slabs * problem.slots)


def write_arguments(
    buffer: Any, problem: MoeProblem, configuration: FewConfiguration, product: Product
) -> None:
    """All fields of a product's `Parameters` but the addresses, that of a bias among them."""
    up = product is Product.UP
    inner, outer = (problem.hidden, problem.intermediate) if up else (problem.intermediate, problem.hidden)
    row = inner * problem.dtype.itemsize
    if not (up and problem.gated):
        tile_rows, lane_rows, high_rows = 16, 1, 8
    elif problem.w13_layout is W13Layout.INTERLEAVED:
        tile_rows, lane_rows, high_rows = 16, 2, 1
    else:
        tile_rows, lane_rows, high_rows = 8, 1, problem.intermediate
    _REST.pack_into(
        buffer,
        ADDRESSES.size,
        (problem.w13_rows if up else problem.hidden) * row,
        tile_rows * row,
        lane_rows * row,
        high_rows * row,
        row,
        problem.slots,
        problem.tokens,
        problem.top_k,
        problem.experts,
        inner,
        outer,
        _tiles(problem, product),
        _slabs(problem, configuration, product),
        problem.top_k if up else 1,
        int(problem.ids64),
    )
    if _is_biased(problem, product):
        strides = problem.w13_bias_strides if up else (1, 0)
        _BIAS.pack_into(buffer, ARGUMENT_BYTES, 0, problem.w13_rows if up else problem.hidden, *strides)


def _most_slots(configuration: FewConfiguration) -> int:
    return min(configuration.max_slots, configs.DIRECT_SLOTS if configuration.direct else configs.MAX_SLOTS)


def _countable(problem: MoeProblem, configuration: FewConfiguration) -> bool:
    """Whether routing fits shared memory, and strides inside an expert 32 bits."""
    longest = max(problem.intermediate * problem.hidden, 16 * max(problem.hidden, problem.intermediate))
    return (
        problem.slots <= _most_slots(configuration)
        and problem.experts <= configs.MAX_EXPERTS
        and longest * problem.dtype.itemsize < 1 << 32
    )


def _tiles(problem: MoeProblem, product: Product) -> int:
    """Of 16 rows of weights, of one expert."""
    if product is Product.DOWN:
        return problem.hidden // 16
    return problem.w13_rows // 16


def _slabs(problem: MoeProblem, configuration: FewConfiguration, product: Product) -> int:
    return -(-_tiles(problem, product) // _tile(configuration, product).unit_tiles)


def _tile(configuration: FewConfiguration, product: Product) -> FewProduct:
    return configuration.up if product is Product.UP else configuration.down
