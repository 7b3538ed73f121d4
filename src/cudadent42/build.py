"""The build stage: the kernels that a run needs, compiled or found in the cache, and what they need of the device."""

from __future__ import annotations

from collections.abc import Sequence

from flashmoe_science.errors import BuildError, DeviceError

from cudadent42.errors import BuildFailedError, UsageError
from cudadent42.records import BuildFailure, BuildReport, Plan

OURS = "cudadent42"
"""The implementation whose kernels this project compiles."""


def build_for(plan: Plan) -> BuildReport:
    """The kernels that the plan's own implementation needs on the plan's device; none where it is not raced."""
    if OURS not in plan.implementations:
        return BuildReport(())
    return build(plan.device)


def build(device: str, architectures: Sequence[str] = ()) -> BuildReport:
    """Build for ``cpu``, for ``cuda:N``, or for the named CUDA architectures, which need not be present.

    A kernel that does not compile is a failure in the report. Raises UsageError for architectures on a CPU and
    where something that compiling needs is missing.
    """
    if device == "cpu" and architectures:
        raise UsageError("--arch names CUDA architectures; give --device cuda with it")
    try:
        kernels = _build_cpu() if device == "cpu" else _build_cuda(device, architectures)
    except BuildError as error:
        return BuildReport((), (BuildFailure("attention", _target(device, architectures), str(error), error.log),))
    except DeviceError as error:
        raise BuildFailedError(str(error)) from error
    return kernels
