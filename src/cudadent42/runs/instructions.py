"""Which instructions a run on a CPU had: ratios of one set say nothing about another."""

from __future__ import annotations

from cudadent42.model import text
from cudadent42.runs.run_folder import Manifest

_SETS = {
    "amx": "AVX-512 with AMX",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512_bf16": "AVX-512 with BF16",
    "portable": "no vector instructions of its own",
}
"""Instruction sets that our kernels are compiled for, as a reader knows them."""


def instruction_set(manifest: Manifest) -> str:
    """The widest of ``AMX``, ``AVX-512`` and ``AVX2``, of a run on CPU; empty where it is not known."""
    features = str(manifest.machine.facts.get("cpu_features") or "").split()
    if manifest.plan.device != "cpu":
        return ""
    named = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for feature, name in named.items() if feature in features), "")


def held_to(manifest: Manifest) -> str:
    """The instruction set that a run on CPU was told to take, in place of the processor's best; empty if none."""
    named = manifest.environment.get("FLASHMOE_CPU_ISA", "")
    return _SETS.get(named, text.clean(named)) if manifest.plan.device == "cpu" else ""


def with_instructions(device: str, manifest: Manifest) -> str:
    """The device's name, with the instruction set where ratios depend on it."""
    held, widest = held_to(manifest), instruction_set(manifest)
    if held:
        return f"{device}, held to {held}"
    return f"{device} with {widest}" if widest else device
