"""The device that a stage runs on, in this process."""

from __future__ import annotations

import torch

from cudadent42.base.errors import UsageError
from cudadent42.model.records import TimerKind


def use_device(device: str) -> None:
    """Makes ``cpu`` or ``cuda:N`` the current device. Raises ``UsageError`` where there is none of that
    name."""
    if not device.startswith("cuda"):
        return
    require_cuda(device)
    torch.cuda.set_device(device)
    _settle(device)


def require_cuda(device: str) -> None:
    """Raises ``UsageError`` where there is no ``cuda:N``."""
    if not torch.cuda.is_available():
        raise UsageError(f"there is no CUDA device for {device}: this torch sees none; use --device cpu")
    count = torch.cuda.device_count()
    if (torch.device(device).index or 0) >= count:
        raise UsageError(
            f"there is no {device}: this machine has {count} CUDA device(s), cuda:0 to cuda:{count - 1}"
        )


def _settle(device: str) -> None:
    """PyTorch orders its attention kernels by the GPU at the first call of all: afterwards the order is a setting that
    stays. It has to stay as PyTorch has it before anybody watches who changes it."""
    tiny = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device=device)
    torch.nn.functional.scaled_dot_product_attention(tiny, tiny, tiny)


def use_threads(timer: TimerKind) -> None:
    """One thread where processor time is measured: the same code is then verified and timed."""
    if timer is TimerKind.CPU:
        torch.set_num_threads(1)


def synchronize(device: str) -> None:
    """Waits for the device. Raises RuntimeError for what a kernel did wrong before."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


class DeviceLostError(Exception):
    """A kernel fault left this process's GPU context unusable; only a new process can go on."""


def raise_if_device_lost(device: str) -> None:
    """After a failure on CUDA: whether the context still works. Raises ``DeviceLostError`` if not."""
    try:
        synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError(str(error)) from error
