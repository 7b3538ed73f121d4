"""RMS norms of models: PyTorch's one kernel in place of the library's eight, on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from flashmoe_science.huggingface.instances import is_hooked, replace_forward, restore_forward
from flashmoe_science.huggingface.registration import uses
from flashmoe_science.takeover.counts import Entry, count

_SUFFIX = "RMSNorm"
_EPSILONS = ("variance_epsilon", "eps")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROBES = 16
"""Rows on which the class's own code is compared with PyTorch's."""
_ULPS = 2
"""By which they may differ: the library rounds before the product with the weight as well."""
_ATTRIBUTE = "_cudadent42_norm"
Kind = tuple[Any, ...]
"""Of norms that compute alike: a class, and the attributes of its instance, the size of a group for one."""
_devices = ("cuda",)
"""Where PyTorch has one kernel for it. On a CPU it composes it, as the library does."""


@dataclass(frozen=True)
class Norm:
    """What a norm that was taken keeps beside its weight."""

    config: Any
    """That of its model; see `registration.uses`."""
    implementation: str
    eps: float


def is_norm(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith(_SUFFIX)


def take(norm: torch.nn.Module, config: Any, implementation: str, *, alike: dict[Kind, bool]) -> str | None:
    """Let PyTorch's kernel compute the norm, where its input is on a GPU; None if it does, else why not.

    Args:
        config: of the model that the norm is part of.
        alike: which kinds compute what PyTorch's `rms_norm` does. Kinds that are not in it are added.
    """
    if hasattr(norm, _ATTRIBUTE) and is_hooked(norm, forward):
        return None  # since it was taken, and the hook calls it
    reason = _why_not(norm)
    if reason is not None:
        return reason
    taken = Norm(config, implementation, _epsilon(norm))
    kind = _kind(norm)
    if kind not in alike:
        alike[kind] = _computes_alike(norm, taken)
    if not alike[kind]:
        return "its class norms otherwise"
    setattr(norm, _ATTRIBUTE, taken)
    replace_forward(norm, forward)
    return None


def give_back(norm: torch.nn.Module) -> None:
    """Let its class's own code run again, where it was taken."""
    if hasattr(norm, _ATTRIBUTE) and restore_forward(norm, forward):
        delattr(norm, _ATTRIBUTE)


def forward(self: Any, *inputs: Any, **options: Any) -> torch.Tensor:
    """In place of a norm's own."""
    taken: Norm = getattr(self, _ATTRIBUTE)
    weight = self.weight
    if (
        len(inputs) == 1
        and not options
        and not is_dynamo_compiling()
        and uses(taken.config, taken.implementation)
    ):
        [rows] = inputs
        if rows.device.type in _devices:
            reason = _why_not_call(rows, weight)
            count(Entry.HUGGING_FACE_NORM, reason)
            if reason is None:
                return functional.rms_norm(rows, weight.shape, weight, taken.eps)
    own: torch.Tensor = type(self).forward(self, *inputs, **options)
    return own


def _why_not_call(rows: torch.Tensor, weight: torch.Tensor) -> str | None:
    if type(rows) is not torch.Tensor or type(weight) is not torch.nn.Parameter:
        return "a subclass of Tensor"
    if rows.dtype is not weight.dtype:
        return "a weight of another dtype"
    if torch.is_autocast_enabled(rows.device.type):
        return "autocast, which would norm in float32"
    return None


def _epsilon(norm: Any) -> float:
    return float(next(getattr(norm, name) for name in _EPSILONS if hasattr(norm, name)))


def _why_not(norm: torch.nn.Module) -> str | None:
    if is_hooked(norm, forward):
        return "a norm that somebody else's hook calls"
    parts = [name for name, _ in (*norm.named_parameters(), *norm.named_buffers())]
    weight = getattr(norm, "weight", None)
    if parts != ["weight"] or type(weight) is not torch.nn.Parameter or weight.dim() != 1:
        return "a norm of another form"
    if not any(isinstance(getattr(norm, name, None), float) for name in _EPSILONS):
        return "a norm of another form"
    if weight.dtype not in _DTYPES:
        return f"a weight of {weight.dtype}"
    if weight.is_meta:
        return "a norm without memory"
    return None


def _kind(norm: torch.nn.Module) -> Kind:
    settings = (
        (name, value if isinstance(value, bool | int | float | str | None) else id(value))
        for name, value in vars(norm).items()
        if not name.startswith("_") and name not in ("forward", "training")
    )
    return type(norm), *settings


@torch.no_grad()
def _computes_alike(norm: Any, taken: Norm) -> bool:
    """Whether the class's own code and PyTorch's agree on rows drawn at random, of which some are near zero."""
    weight = norm.weight
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(_PROBES, weight.shape[0], generator=generator, dtype=torch.float32, device="cpu")
    rows[: _PROBES // 2] *= taken.eps**0.5
    rows = rows.to(weight.device, weight.dtype)
    try:
        own = type(norm).forward(norm, rows)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    expected = functional.rms_norm(rows, weight.shape, weight, taken.eps)
    precision = torch.finfo(weight.dtype).eps
    return own.dtype == expected.dtype and torch.allclose(own, expected, rtol=_ULPS * precision, atol=0)
