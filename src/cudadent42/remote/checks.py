"""What can be checked here, without a GPU, before anything is started elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cudadent42.errors import BuildFailedError
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from flashmoe_science.errors import BuildError, DeviceError


def check_plan(choices: Choices) -> None:
    """Suite, cases and implementations exist, whichever device they will run on. Raises UsageError."""
    make_plan(choices, "cpu", registry)


def check_kernels(architectures: Sequence[str], say: Callable[[str], None]) -> None:
    """The CUDA kernels compile for the GPUs there. Raises BuildFailedError."""
    if not architectures:
        return
    from flashmoe_science.cuda import build

    names = ", ".join(architectures)
    try:
        built = build(architectures)
    except DeviceError as error:
        say(f"the kernels are not compiled here for {names} first: {error}")
    except BuildError as error:
        raise BuildFailedError(
            f"a kernel does not compile for {names}, so nothing was started: {error}"
        ) from error
    else:
        say(f"{len(built)} kernels compile for {names}")
