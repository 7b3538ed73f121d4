"""What a contestant says of its outputs while the clock runs, so that none of them can be made later.

Of each output some sums of its entries' magnitudes with random signs, by a seed that is told when all calls are made.
Whoever has not computed nearly all entries cannot say them, and what is handed out later has to have the same sums.

Real sums, and no checksum of bits: which bits are right is open within a tolerance, and who names any checksum can
afterwards choose the low bits so that it comes true. A sum of magnitudes is moved by those no further than they go
themselves. Magnitudes, since signed sums of a matrix product are had for less than the product (Freivalds, 1977).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cudadent42.base.seeds import derived_seed

SUMS = 16
"""Of each output. To guess one to within a bf16's tolerance succeeds about once in a hundred times."""

_ROW = 256
"""Entries that are summed by a matrix product."""

_GROUP_BYTES = 256 << 20
"""Of outputs whose magnitudes are made at once."""


def sketches(outputs: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Of ``outputs`` (count, ...): the sums (count, ``SUMS``), and their standard deviations over all seeds (count, 1),
    both float32 on its device."""
    entries = outputs.flatten(1) if outputs.dim() > 1 else outputs[:, None]
    size = entries.shape[1]
    generator = torch.Generator(device=outputs.device).manual_seed(derived_seed(seed, "signs"))
    whole = size // _ROW * _ROW
    exact, summed = _precisions(outputs.dtype)
    in_row = _signs((_ROW, SUMS), generator, summed)
    of_row = _signs((whole // _ROW, SUMS), generator, exact)
    in_rest = _signs((size - whole, SUMS), generator, exact)
    at_once = max(1, _GROUP_BYTES // max(1, size * entries.element_size()))
    sums, squares = [], []
    for first in range(0, len(entries), at_once):
        group = entries[first : first + at_once]
        magnitudes = group.abs().to(summed)
        rest = magnitudes[:, whole:].to(exact)
        with _summed_in_float32():
            rows = magnitudes[:, :whole].reshape(-1, _ROW) @ in_row
        parts = rows.view(len(group), whole // _ROW, SUMS).to(exact)
        sums.append((parts * of_row).sum(1) + rest @ in_rest)
        squares.append(parts.square().sum((1, 2)) / SUMS + rest.square().sum(1))
    return torch.cat(sums).float(), torch.cat(squares).sqrt()[:, None].float()


def tolerance(dtype: torch.dtype) -> float:
    """Of two sketches of results of a dtype, relative to a sum's standard deviation.

    Sums of the same bits in another order differ by an eighth of it at most: 0.1 % in bf16. A hundredth of the entries
    that came later makes 10 %, entries with three bits of mantissa 3 %.
    """
    return max(1e-5, 1.28 * torch.finfo(dtype).eps)


@contextmanager
def _summed_in_float32() -> Iterator[None]:
    """Whatever the process has chosen for its own products, as the judge's has not."""
    cublas = torch.backends.cuda.matmul
    before = cublas.allow_fp16_accumulation
    cublas.allow_fp16_accumulation = False
    try:
        yield
    finally:
        cublas.allow_fp16_accumulation = before


def _precisions(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """That of sums of sums, and that in which a row is summed: wide enough that no setting of PyTorch's lowers it."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32, dtype
    return torch.float64, torch.float64


def written(sums: Tensor) -> str:
    """Sums as text."""
    return base64.b64encode(sums.cpu().numpy().tobytes()).decode()


def read(text: str, count: int) -> Tensor | None:
    """The sums (``count``, ``SUMS``) of a text; None where it is no such text."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(data) != 4 * count * SUMS:
        return None
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(count, SUMS)


def differing(said: Tensor, outputs: Tensor, seed: int) -> int:
    """How many of the sums ``said`` (count, ``SUMS``) are not those of ``outputs`` (count, ...)."""
    own, deviation = sketches(outputs, seed)
    said = said.to(own.device)
    same = (said - own).abs() <= tolerance(outputs.dtype) * deviation
    same |= (said == own) | (said.isnan() & own.isnan())
    return int((~same).sum())


def _signs(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    bits = torch.randint(2, shape, generator=generator, dtype=torch.int8, device=generator.device)
    return (2 * bits - 1).to(dtype)
