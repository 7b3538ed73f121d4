"""What a compiled CUDA kernel is made of: its machine instructions by kind, as ``nvdisasm`` lists them."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from flashmoe_science.jit.requirements import install_command

_PACKAGES = ("nvidia-cuda-nvdisasm", "nvidia-cuda-nvcc")
_TIMEOUT_S = 60
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_WIDTHS = {"128": 128, "64": 64, "16": 16, "U16": 16, "S16": 16, "8": 8, "U8": 8, "S8": 8}
_DEFAULT_WIDTH = 32

MISSING = f"no nvdisasm, so the compiled kernel is not looked into; {install_command('profile')}"

_KINDS = {
    "wgmma": ("HGMMA", "QGMMA", "IGMMA", "BGMMA"),
    "mma_sync": ("HMMA", "IMMA", "BMMA", "DMMA", "QMMA"),
    "tcgen05": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
    "fma": ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2"),
    "special": ("MUFU",),
    "local_loads": ("LDL",),
    "local_stores": ("STL",),
    "tma_loads": ("UTMALDG", "UBLKCP"),
    "tma_stores": ("UTMASTG",),
    "matrix_loads": ("LDSM",),
    "barriers": ("BAR", "SYNCS", "WARPSYNC", "DEPBAR", "LDGDEPBAR"),
    "register_moves": ("USETMAXREG",),
}
"""Our names, and the opcodes (up to the first dot) that they stand for."""

_ACCESSES = {"load": ("LDG", "LDGSTS"), "store": ("STG",), "shared_load": ("LDS",), "shared_store": ("STS",)}
"""Counted by width in bits: ``load_128`` and so on."""


def find() -> str | None:
    """``nvdisasm`` on the PATH, of NVIDIA's wheel, or of an installed toolkit."""
    return shutil.which("nvdisasm") or _in_wheels() or _in_toolkit()


def _in_wheels() -> str | None:
    for package in _PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        path = next((file.locate() for file in files if file.name == "nvdisasm"), None)
        if path is not None and os.access(str(path), os.X_OK):
            return str(path)
    return None


def _in_toolkit() -> str | None:
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    return next((str(h / "bin/nvdisasm") for h in homes if os.access(h / "bin/nvdisasm", os.X_OK)), None)


@functools.lru_cache(maxsize=64)
def count(cubin: Path) -> dict[str, int] | None:
    """Instructions of a cubin by kind; None where there is no disassembler, or it does not know the architecture."""
    program = find()
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-c", str(cubin)], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return count_text(done.stdout) if done.returncode == 0 else None


def count_text(listing: str) -> dict[str, int]:
    """Instructions of a listing by kind: those of ``_KINDS``, accesses by width, and ``total``."""
    opcodes = Counter(match[1] for match in _INSTRUCTION.finditer(listing))
    kinds = {opcode: name for name, group in _KINDS.items() for opcode in group}
    accesses = {opcode: name for name, group in _ACCESSES.items() for opcode in group}
    counts = Counter(dict.fromkeys(_KINDS, 0))
    for opcode, number in opcodes.items():
        first, *modifiers = opcode.split(".")
        if first == "NOP":  # what fills up the end
            continue
        counts["total"] += number
        if first in kinds:
            counts[kinds[first]] += number
        if first in accesses:
            counts[f"{accesses[first]}_{_width(modifiers)}"] += number
    return dict(counts)


def _width(modifiers: list[str]) -> int:
    """Bits that a lane moves."""
    return next((_WIDTHS[modifier] for modifier in modifiers if modifier in _WIDTHS), _DEFAULT_WIDTH)
