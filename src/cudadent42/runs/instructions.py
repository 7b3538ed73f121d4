"""Which instructions a run on a CPU had: ratios of one set say nothing about another."""

from __future__ import annotations

from cudadent42.model import text
from cudadent42.runs.run_folder import Manifest

_CLASSES = {
    **{"amx": "AMX", "amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"},
    **{"avx512": "AVX-512", "avx512f": "AVX-512", "avx2": "AVX2"},
    "portable": "no vector instructions of its own",
}
"""The widest first."""


def instruction_set(manifest: Manifest) -> str:
    """The widest that a run on CPU compiled for, else that its processor has; empty if none is known."""
    if manifest.plan.device != "cpu":
        return ""
    kernels = manifest.build.kernels if manifest.build else ()
    compiled = {compiled_for(each.recipe.architecture) for each in kernels if each.recipe.backend == "host"}
    features = compiled - {""} or str(manifest.machine.facts.get("cpu_features") or "").split()
    return next((name for each, name in _CLASSES.items() if each in features and each != "portable"), "")


def compiled_for(architecture: str) -> str:
    """``avx2`` of "x86_64:avx2+avx2+fma+f16c"."""
    return architecture.partition(":")[2].partition("+")[0]


def held_to(manifest: Manifest) -> str:
    """The instruction set that a run on CPU was told to take, in place of the processor's best; empty if none."""
    named = manifest.environment.get("FLASHMOE_CPU_ISA", "")
    return _CLASSES.get(named, text.clean(named)) if manifest.plan.device == "cpu" else ""


def with_instructions(device: str, manifest: Manifest) -> str:
    """The device's name, with the instruction set where ratios depend on it."""
    held, widest = held_to(manifest), instruction_set(manifest)
    if held:
        return f"{device}, held to {held}"
    return f"{device} with {widest}" if widest else device


def device_name(manifest: Manifest) -> str:
    """Where preflight found it, else ``cpu`` or ``cuda:N``."""
    _, separator, name = manifest.machine.summary.partition("dev=")
    return text.clean(name) if separator and name else manifest.plan.device


def device_words(manifest: Manifest) -> str:
    """That, with its instructions."""
    return with_instructions(device_name(manifest), manifest)
