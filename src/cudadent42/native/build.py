"""Building a kernel file in a process of its own: compilers run on other people's source, and NVRTC runs in-process."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudadent42.base.errors import MachineNotReadyError, UsageError
from cudadent42.base.serialise import dumps, loads
from cudadent42.model.cases import Case
from cudadent42.model.implementations import file_path
from cudadent42.model.records import BuildFailure, BuildReport
from cudadent42.native import kernels, specification
from cudadent42.native.specification import Language
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.sandbox.launch import FOLDER, Sandbox
from flashmoe_science.errors import BuildError, DeviceError, NoRoomError
from flashmoe_science.jit.limits import base_architecture
from flashmoe_science.jit.records import KernelBuild

TIMEOUT_S = 600.0
"""Of all kernels of one file; one takes seconds."""

_MOST_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True)
class Request:
    """What the other process is to compile. Empty: all that the file has."""

    file: str
    architectures: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    report: BuildReport
    not_ready: str = ""
    """Why this machine cannot compile, where it cannot."""


def build_file(
    name: str,
    device: str,
    architectures: Sequence[str],
    cases: Sequence[Case],
    sandbox: Sandbox | None = None,
) -> list[KernelBuild | BuildFailure]:
    """The kernels of a file that the cases can lead to; of all that it has without any.

    Args:
        device: ``cpu`` or ``cuda``.
        architectures: of CUDA.
        sandbox: what the compiler is confined to; what it compiles is then not kept.

    Raises:
        UsageError: the file makes no sense, or is for the other kind of device.
        MachineNotReadyError: this machine has no compiler for it, or no room for what that makes.
    """
    kernel = specification.load(file_path(name))
    if kernel.device != device:
        raise UsageError(
            f"{name} is compiled for {kernel.device}, not for {device}; give --device {kernel.device}"
            + (
                " and --arch, such as sm_90a, where there is no GPU"
                if kernel.language is Language.CUDA
                else ""
            )
        )
    own = [case for case in cases if isinstance(case, AttentionCase)]
    request = Request(
        file=str(kernel.path.absolute()),
        architectures=tuple(architectures),
        dtypes=tuple(dict.fromkeys(case.dtype for case in own)),
        head_dims=tuple(dict.fromkeys(case.head_dim for case in own)),
    )
    try:
        told = _ask(request, sandbox)
    except _NoAnswerError as error:
        architecture = ", ".join(architectures) or platform.machine()
        return [BuildFailure(kernel.entry, architecture, str(error), error.log)]
    if told.not_ready:
        raise MachineNotReadyError(told.not_ready)
    return [*told.report.kernels, *told.report.failures]


class _NoAnswerError(Exception):
    """The compiling process gave no answer."""

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log
        """What it printed."""


def _ask(request: Request, sandbox: Sandbox | None) -> Answer:
    """The answer of a process of its own. Raises _NoAnswerError."""
    with tempfile.TemporaryFile() as result:
        command = [
            *(sys.executable, "-X", "faulthandler"),
            *("-m", "cudadent42.native.build", str(result.fileno())),
        ]
        environment = _environment()
        if sandbox is not None:
            command, environment = sandbox.command(command), sandbox.environment(environment)
        try:
            done = subprocess.run(
                command,
                input=dumps(request, indent=None),
                env=environment,
                cwd=None if sandbox is None else FOLDER,
                pass_fds=(result.fileno(),),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _NoAnswerError(f"it was still compiling after {TIMEOUT_S:.0f} s; killed") from error
        result.seek(0)
        text = result.read(_MOST_ANSWER_BYTES).decode(errors="replace")
    if done.returncode != 0 or not text:
        raise _NoAnswerError(_death(done.returncode), done.stderr)
    try:
        return loads(Answer, text)
    except ValueError as error:
        raise _NoAnswerError(f"the compiling process answered nonsense ({error})") from error


def code_of(
    file: Path, case: Case, architecture: str, built: Sequence[KernelBuild | BuildFailure]
) -> tuple[KernelBuild, str] | str:
    """Of what `build_file` built, the kernel that a case gets and how it is launched, or why there is none.

    ``architecture`` is empty on a CPU.
    """
    kernel = specification.load(file)
    assert isinstance(case, AttentionCase)
    base = base_architecture(architecture) if architecture else None
    reason = kernel.why_not(case, base)
    if reason is not None:
        return reason
    configuration = kernel.find(case.dtype, case.head_dim, base)
    assert configuration is not None
    macros = kernels.macros_of(kernel, configuration, case, base)
    for build in built:
        if isinstance(build, KernelBuild) and build.recipe.configuration == macros:
            shared = configuration.dynamic_shared_bytes(case.head_dim)
            return build, repr((configuration.threads, shared, configuration.grid))
    return next((each.message for each in built if isinstance(each, BuildFailure)), "it was not compiled")


def _death(code: int) -> str:
    if code < 0:
        return f"the compiler died: signal {-code} ({signal.Signals(-code).name})"
    return f"the compiling process ended with exit code {code}"


def _environment() -> dict[str, str]:
    """With this package on the path, wherever it was imported from."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    paths = [root, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


# ---------------------------------------------------------------- the other process


def answer(request: Request) -> Answer:
    """Compile what is asked for, in this process."""
    kernel = specification.load(Path(request.file))
    built: list[KernelBuild] = []
    failures: list[BuildFailure] = []
    try:
        if kernel.language is Language.CUDA:
            for item in kernels.cuda_kernels(
                kernel, request.architectures, request.dtypes, request.head_dims
            ):
                try:
                    built.append(kernels.build_cuda(item))
                except NoRoomError:
                    raise
                except BuildError as error:
                    failures.append(BuildFailure(item.label, item.architecture, str(error), error.log))
        else:
            for configuration, dtype in kernels.host_configurations(
                kernel, request.dtypes, request.head_dims
            ):
                try:
                    built.append(kernels.build_host(kernel, configuration, dtype))
                except NoRoomError:
                    raise
                except BuildError as error:
                    failures.append(BuildFailure(kernel.entry, platform.machine(), str(error), error.log))
    except (DeviceError, NoRoomError) as error:
        return Answer(BuildReport(()), str(error))
    return Answer(BuildReport(tuple(built), tuple(failures)))


def main() -> int:
    """``python -m cudadent42.native.build DESCRIPTOR``, with a request on standard input."""
    with open(int(sys.argv[1]), "w", encoding="utf-8") as result:
        result.write(dumps(answer(loads(Request, sys.stdin.read()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
