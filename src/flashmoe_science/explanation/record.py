"""What an explanation says, and what a function has to answer to be explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.cuda.choice import Choice, Refusal
from flashmoe_science.cuda.device import Device
from flashmoe_science.jit.host import InstructionSet

Arguments = Mapping[str, Any]
"""All of a function's, by name, with its defaults."""


@dataclass(frozen=True)
class Explanation:
    """What a call takes. `str()` gives it as a few lines."""

    operation: str
    device: str
    """``cpu``, or the GPU and its architecture."""
    kernel: str
    configuration: Any
    """A frozen record of the kernel's own, or on a CPU the name of the instruction set."""
    reason: str
    others: tuple[tuple[str, str], ...]
    """Each other kernel (on a CPU: instruction set), and why it is not taken."""
    gradients: str | None = None
    """What computes the backward pass, where it is not a kernel."""

    def __str__(self) -> str:
        lines = [
            f"{self.operation} on {self.device}: {self.kernel}, {self.reason}",
            f"  {self.configuration}",
        ]
        lines += [f"  not {name}: {reason}" for name, reason in self.others]
        return "\n".join(lines if self.gradients is None else [*lines, f"  gradients: {self.gradients}"])


def _nothing_further(arguments: Arguments, chosen: InstructionSet) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Explainable:
    """A public function that can be explained."""

    function: Callable[..., Any]
    check: Callable[[Arguments], torch.Tensor]
    """Raises InputError unless the arguments make sense; gives the first tensor."""
    on_cuda: Callable[[Arguments, Device | None], Explanation]
    """For a GPU that need not be there, else that of the tensors. Raises InputError as `check` does, and DeviceError
    where no kernel takes the call."""
    cpu_kernel: Callable[[Arguments], str]
    """Of `flashmoe_science.cpu`, for a call that was checked."""
    on_matrix_unit: Callable[[Arguments], bool] | None
    """Whether a CPU's matrix unit takes products of such a call, which was checked. None: there are no products."""
    further: Callable[[Arguments, InstructionSet], Sequence[str]] = _nothing_further
    """What the code takes besides the instruction set."""

    @property
    def name(self) -> str:
        return self.function.__name__


def explained_on_cuda(
    operation: str, device: Device, choice: Choice, others: Sequence[Refusal], gradients: str | None = None
) -> Explanation:
    """What was chosen for a GPU, and why each other kernel was not."""
    return Explanation(
        operation=operation,
        device=f"{device.architecture} with {device.multiprocessors} multiprocessors",
        kernel=choice.kernel.value,
        configuration=choice.configuration,
        reason=choice.reason,
        others=tuple((other.kernel.value, other.reason) for other in others),
        gradients=gradients,
    )
