"""What can be checked here, without a GPU, before anything is started elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from cudadent42.base.errors import BuildFailedError, MachineNotReadyError, UsageError
from cudadent42.model.device_names import parse_device
from cudadent42.plan import Choices, make_plan
from cudadent42.preflight.gpu import MIN_CAPABILITY
from cudadent42.registry import registry
from cudadent42.remote.core.terminal import Say
from cudadent42.stages.build import build

_GPU = "cuda:0"
_OLDEST = MIN_CAPABILITY[0] * 10 + MIN_CAPABILITY[1]


def check_plan(choices: Choices, device: str) -> None:
    """Suite, cases and implementations exist on a device: on a GPU or on a CPU where that is the machine's to say
    (``auto``), since a suite may have another in its place there. Raises UsageError."""
    wanted = parse_device(device)
    if wanted != "auto":
        make_plan(choices, wanted, registry)
        return
    try:
        make_plan(choices, _GPU, registry)
    except UsageError as error:
        try:
            make_plan(choices, "cpu", registry)
        except UsageError:
            raise error from None


def check_kernels(choices: Choices, architectures: Sequence[str], say: Say) -> None:
    """The CUDA kernels that a run needs, the user's own too, compile for the GPUs there and fit them.

    Raises:
        BuildFailedError: one does not.
        MachineNotReadyError: all GPUs there are older than any that preflight passes.
        UsageError: the choices make no run on a GPU.
    """
    new_enough = tuple(name for name in architectures if int(name.removeprefix("sm_")) >= _OLDEST)
    if architectures and not new_enough:
        raise MachineNotReadyError(
            f"the GPU there is {architectures[0]}, and sm_{_OLDEST} or newer is needed; nothing was started: take "
            "another machine, or --device cpu"
        )
    if not new_enough:
        return
    plan = make_plan(choices, _GPU, registry)
    names = ", ".join(new_enough)
    try:
        built = build(_GPU, new_enough, lambda done, total, name: None, plan.cases, plan.implementations)
    except MachineNotReadyError as error:
        say(f"the kernels are not compiled here for {names} first: {error}")
        return
    for failure in built.failures:
        say(failure.log)
    if built.failures:
        first = built.failures[0]
        raise BuildFailedError(
            f"{first.kernel} does not compile for {first.architecture}, so nothing was started: {first.message}"
        )
    if built.kernels:
        say(f"all kernels of this run compile for {names}")
