"""Which instructions a run on a CPU had: ratios of one set say nothing about another."""

from __future__ import annotations

from cudadent42.model import text
from cudadent42.runs.run_folder import Manifest

_CLASSES = {"amx": "AMX", "avx512_bf16": "AVX512-BF16", "avx512": "AVX-512", "avx2": "AVX2"}
"""Instruction sets that our kernels are compiled for, the widest first, as a reader knows them."""
_FEATURES = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
"""What a processor has of them."""


def instruction_set(manifest: Manifest) -> str:
    """The widest class that a run on CPU compiled kernels for, else that its processor has; empty if neither is known.

    They differ where the compiler is too old, or a variant of fewer instructions was measured alone.
    """
    if manifest.plan.device != "cpu":
        return ""
    kernels = manifest.build.kernels if manifest.build else ()
    compiled = {
        compiled_for(each.recipe.architecture)[0] for each in kernels if each.recipe.backend == "host"
    }
    compiled.discard("")  # of a folder that names features alone
    features = set(str(manifest.machine.facts.get("cpu_features") or "").split())
    recorded, words = (compiled, _CLASSES) if compiled else (features, _FEATURES)
    return next((name for each, name in words.items() if each in recorded), "")


def compiled_for(architecture: str) -> tuple[str, tuple[str, ...]]:
    """``avx2``, and the features, of a recipe's "x86_64:avx2+avx2+fma+f16c"."""
    name, *features = architecture.partition(":")[2].split("+")
    return name, tuple(features)


def held_to(manifest: Manifest) -> str:
    """The instruction set that a run on CPU was told to take, in place of the processor's best; empty if none."""
    named = manifest.environment.get("FLASHMOE_CPU_ISA", "")
    if manifest.plan.device != "cpu" or not named:
        return ""
    return (
        "no vector instructions of its own" if named == "portable" else _CLASSES.get(named, text.clean(named))
    )


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
    """The device's name as preflight found it, with the instruction set where ratios depend on it."""
    return with_instructions(device_name(manifest), manifest)
