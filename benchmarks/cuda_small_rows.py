"""Some hundred rows and keys, few heads: where the small-shape kernel ends and the others begin, on the GPU at hand.

    python benchmarks/cuda_small_rows.py --output sweep.json
    python benchmarks/cuda_small_rows.py --write-choices before.json          # needs no GPU
    python benchmarks/cuda_small_rows.py --before before.json --output race.json

The first races every configuration of the small kernel, the other kernels, and PyTorch's choice and cuDNN. The
last races what is chosen now against the choices in a file, PyTorch's beside them. Microseconds of
GPU time of one of 20 calls that wait behind a kernel that spins, medians of rounds in which all take turns; each
checked against float64 before.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver
from cuda_decode import ROW_SHAPES, SHAPES, SPLIT_SHAPES
from cuda_small import BORDER, Call, Shape, compile_all, expected, name, own, sdpa, square
from provenance import provenance
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmoe_science.configs.attention import small as configs
from flashmoe_science.configs.attention.hopper import HopperConfiguration
from flashmoe_science.configs.attention.portable import PortableConfiguration
from flashmoe_science.configs.attention.small import CLUSTERS, KEY_TILE, SmallConfiguration, stream
from flashmoe_science.cuda.attention import KernelKind, hopper, portable, select, small
from flashmoe_science.cuda.choice import Choice
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.driver import load, make_context_current
from flashmoe_science.errors import BuildError, DeviceError

H200 = Device(0, "sm_90", 132, 60 << 20)
CALLS = 20
SPIN_CYCLES = 500_000
MOST_SPIN_CYCLES = 64_000_000
SWEPT = (0.15, 2.5)
"""What the small kernel reads over the most that it was taken for, `small.choose`, at first."""
CONFIGURATIONS = {
    KernelKind.SMALL: SmallConfiguration,
    KernelKind.HOPPER: HopperConfiguration,
    KernelKind.PORTABLE: PortableConfiguration,
}


def sweep_shapes() -> list[Shape]:
    squares = [
        square(1, heads, length, head_dim, causal)
        for head_dim in (64, 128)
        for causal in (False, True)
        for heads in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32)
        for length in (128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072)
    ]
    oblong = [
        Shape(1, heads, heads, rows, keys, head_dim)
        for head_dim in (64, 128)
        for heads in (1, 2, 4, 8, 16)
        for rows in (64, 128, 256, 512, 1024)
        for keys in (256, 512, 1024, 2048, 4096)
        if rows != keys
    ]
    return [shape for shape in squares + oblong if SWEPT[0] <= share(shape) <= SWEPT[1]]


def share(shape: Shape) -> float:
    blocks = shape.batch * shape.heads * -(-shape.seqlen_q // 16)
    return blocks * 4 * shape.seqlen_k * shape.head_dim / ((9 << 20) + (40 << 10) * shape.seqlen_k)


def held_out() -> list[Shape]:
    """Shapes from which no rule was made."""
    lengths = (200, 300, 450, 600, 700, 900, 1200, 1800)
    shapes = [
        square(batch, heads, length, head_dim, causal)
        for head_dim in (64, 96, 128, 256)
        for batch, heads in ((1, 1), (1, 2), (1, 5), (2, 2), (1, 10), (3, 4), (2, 12))
        for length, causal in itertools.product(lengths, (False, True))
    ]
    grouped = [
        Shape(batch, 8, kv_heads, rows, keys, 128)
        for batch in (1, 2)
        for kv_heads in (1, 2, 4)
        for rows in (24, 100, 200)
        for keys in (400, 1000, 2500)
    ]
    return [shape for shape in shapes + grouped if SWEPT[0] <= share(shape) <= SWEPT[1]]


def held_out_again() -> list[Shape]:
    """Shapes that nothing was changed for after the first ones were raced."""
    return [
        shape
        for head_dim in (64, 80, 128, 192)
        for batch, heads in ((1, 1), (1, 3), (2, 2), (1, 7), (2, 5), (1, 14))
        for length, causal in itertools.product((224, 280, 350, 500, 560, 840, 1000, 1400), (False, True))
        if SWEPT[0] <= share(shape := square(batch, heads, length, head_dim, causal)) <= SWEPT[1]
    ]


def choices_of(shape: Shape) -> dict[str, Choice]:
    """Every configuration of the small kernel that could be best, and what the others would do."""
    problem = shape.problem()
    rows = shape.seqlen_q * shape.heads // shape.kv_heads
    wanted = [small.configuration_for(problem, H200)]
    one = stream("sm_90", shape.head_dim, rows, 1)
    for cluster in CLUSTERS:
        streamed = stream("sm_90", shape.head_dim, rows, cluster)
        if cluster == 1 or (cluster // 2) * streamed.warps * KEY_TILE < shape.seqlen_k:
            wanted.append(streamed)
    if one.warps == 8:
        wanted += [dataclasses.replace(one, warps=4, cluster=cluster) for cluster in (1, 2, 4)]
    held = [
        configuration
        for configuration in configs.all_configurations("sm_90")
        if configuration.single_pass
        and configuration.head_dim == one.head_dim
        and configuration.padded == (shape.head_dim not in (64, 128))
        and shape.seqlen_k <= configuration.keys_per_pass <= 4 * shape.seqlen_k
        and configuration.row_tiles > 1
    ]
    several = [Choice(KernelKind.SMALL, each) for each in dict.fromkeys(wanted + held)]
    choices = {label(each): each for each in several}
    for module in (hopper, portable):
        other = module.choose(problem, H200)
        if other is not None:
            choices[other.kernel.value] = other
    return choices


def label(choice: Choice) -> str:
    if choice.kernel is not KernelKind.SMALL:
        return choice.kernel.value
    return name(choice.configuration) + (" one pass" if choice.configuration.single_pass else "")


def rivals(shape: Shape, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> dict[str, Call]:
    usual = sdpa(shape, tensors)

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return usual()

    return {"sdpa": usual, "cudnn": cudnn}


def queued(call: Call, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Microseconds of one call of those that were all launched before the first began."""
    cycles = SPIN_CYCLES
    while True:
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        overtaken = begin.query()
        end.synchronize()
        if not overtaken:
            return begin.elapsed_time(end) * 1000 / CALLS
        cycles *= 2
        if cycles > MOST_SPIN_CYCLES:
            raise RuntimeError("calls could not be queued: one waits for the GPU")


def race(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: dict[str, list[float]] = {each: [] for each in calls}
    for _ in range(rounds):
        for each, call in calls.items():
            samples[each].append(queued(call, begin, end))
    return {each: round(statistics.median(values), 2) for each, values in samples.items()}


def right(shape: Shape, tensors: Any, calls: dict[str, Call]) -> tuple[dict[str, Call], list[str]]:
    """Those with right results, and the others."""
    exact, good, wrong = expected(shape, tensors), {}, []
    for each, call in calls.items():
        try:
            error = float((call().double() - exact).abs().max())
        except (BuildError, DeviceError, RuntimeError) as refused:
            wrong.append(f"{each}: {str(refused).splitlines()[0]}")
            continue
        if error < 2**-5:
            good[each] = call
        else:
            wrong.append(f"{each}: error {error:.2e}")
    return good, wrong


def clusters_at_once(choices: Iterable[Choice]) -> dict[str, int]:
    """How many clusters of each kernel the driver says that the GPU holds."""
    counts = {}
    for choice in choices:
        if choice.kernel is not KernelKind.SMALL:
            continue
        kernel = small.kernel(choice.configuration, torch.bfloat16, "sm_90")
        function = load(kernel, 0, False, allow_defects=True)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 32 * 3 * 5 * choice.configuration.cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads_per_block, 1, 1
        status, count = driver.cuOccupancyMaxActiveClusters(driver.CUfunction(function.value), config)
        blocks, per_multiprocessor = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            driver.CUfunction(function.value), kernel.threads_per_block, 0
        )
        key = f"D{choice.configuration.head_dim} {label(choice)}"
        counts[key] = [
            int(count) if int(status) == 0 else None,
            int(per_multiprocessor) if int(blocks) == 0 else None,
        ]
    return counts


def as_record(choice: Choice) -> dict[str, Any]:
    configuration = dataclasses.asdict(choice.configuration)
    configuration.pop("ablation", None)
    return {"kernel": choice.kernel.value, "configuration": configuration}


def as_choice(record: dict[str, Any]) -> Choice:
    kind = KernelKind(record["kernel"])
    return Choice(kind, CONFIGURATIONS[kind](**record["configuration"]))


def race_shapes() -> list[Shape]:
    return list(
        dict.fromkeys(
            [*sweep_shapes(), *held_out(), *held_out_again(), *BORDER, *ROW_SHAPES, *SHAPES, *SPLIT_SHAPES]
        )
    )


def write(path: Path, document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One line for each shape."""
    head = json.dumps(document, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{head},\n "shapes": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--before", type=Path, help="Race against these choices.")
    parser.add_argument("--write-choices", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=10**6, help="Shapes.")
    chosen = parser.parse_args()
    if chosen.write_choices:
        records = {str(shape): as_record(select(shape.problem(), H200)) for shape in race_shapes()}
        chosen.write_choices.write_text(json.dumps(records) + "\n", encoding="utf-8")
        return
    make_context_current(0)
    if chosen.before:
        before = {key: as_choice(record) for key, record in json.loads(chosen.before.read_text()).items()}
        asked = {}
        for shape in (each for each in race_shapes() if str(each) in before):
            pair = {"now": select(shape.problem(), H200), "before": before[str(shape)]}
            if pair["now"].configuration != pair["before"].configuration:
                asked[shape] = pair
    else:
        asked = {shape: choices_of(shape) for shape in sweep_shapes()}
    asked = dict(list(asked.items())[: chosen.most])
    unique = {
        (choice.kernel, dataclasses.replace(choice.configuration, splits=min(2, choice.configuration.splits)))
        if choice.kernel is KernelKind.SMALL
        else (choice.kernel, choice.configuration): choice
        for choices in asked.values()
        for choice in choices.values()
    }
    print(f"{len(asked)} shapes, {len(unique)} kernels", flush=True)
    print(f"compiled in {compile_all(list(unique.values()), [], 'sm_90'):.1f} s", flush=True)
    at_once = clusters_at_once(unique.values())
    print(at_once, flush=True)
    rows = []
    for shape, choices in asked.items():
        tensors = shape.tensors()
        calls = {each: own(shape, tensors, choice) for each, choice in choices.items()} | rivals(
            shape, tensors
        )
        good, wrong = right(shape, tensors, calls)
        taken = {each: label(choice) for each, choice in choices.items()} if chosen.before else None
        row = {
            "shape": list(dataclasses.astuple(shape)),
            "chosen": taken or label(select(shape.problem(), H200)),
            "us": race(good, chosen.rounds),
            "wrong": wrong,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    document = {**provenance("cuda"), "clusters_at_once": at_once}
    write(chosen.output, document, rows)


if __name__ == "__main__":
    main()
