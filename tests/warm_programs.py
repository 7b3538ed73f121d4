"""Which programs `warm_python` may fork instead of executing them, and what they find imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"

COMMAND_LINE = "cudadent42"
SANDBOX = "cudadent42.sandbox.enter"
WORKER = "cudadent42.worker.child"
RUN_AS_PROGRAMS = (
    *(WORKER, "cudadent42.stages.profile.target", "cudadent42.native.build"),
    *("cudadent42.recording.child", "cudadent42.agents.work", "cudadent42.audit.nursery"),
)
START_WORKERS = (COMMAND_LINE, "cudadent42.agents.work")
"""Programs that start programs of the lab in turn."""
AT_FIRST_USE = (
    "torch",
    "torch.nn.attention.bias",  # and with it torch._dynamo and sympy, most of a worker's time
    "flashmoe_science.attention",
    "flashmoe_science.moe",
    "flashmoe_science.explanation",
)
OF_WORKERS = (
    *(
        WORKER,
        "cudadent42.stages.bench.measurement",
        "cudadent42.stages.verify",
        "cudadent42.integrity.watch",
    ),
    *("cudadent42.timing.flush", "cudadent42.timing.limits", "cudadent42.timing.peaks"),
    "cudadent42.versions.loading",  # which quick_kernels has changed
)
"""What a worker imports, besides what is its operation's."""
OF_COMMANDS = (
    *("typer._adapters", "typer._click.decorators", "rich._emoji_codes", "rich._unicode_data.unicode17-0-0"),
    *("encodings.unicode_escape", "cuda.bindings.nvrtc"),
)
"""What a command of the lab imports of others as it parses its words, prints or asks for kernels. Some of it is
private to them, and left out where another version has none."""
OF_MODELS = (
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "flashmoe_science.huggingface",
)
"""What programs import besides that name transformers."""
FOR_EVERY_PROGRAM = ("PATH", "HOME", "USER", "TMPDIR")
THREADS = "OMP_NUM_THREADS"
_PACKAGES = ("cudadent42", "flashmoe_science")
_CUSTOMISATION = ("sitecustomize.py",)
_RUN_AT_THE_START = ("usercustomize.py",)
_SCRIPTS = ("examples", "benchmarks", "tests/hard")
_READ_AT_THE_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "MPL"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "CUDA_", "NVIDIA_"),
)
_READ_BY_MODELS = ("HF_", "TRANSFORMERS_")
_READ_BY_THE_CHILD = ("PYTHONPATH", "PYTHONUNBUFFERED", THREADS)
_READ_AT_USE = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")
"""What a sandbox leads elsewhere, and what PyTorch sets for itself."""
EXECUTES, COMPILES_QUICKLY = "executes", "compiles quickly"
"""What a server may be told of the next two."""

executes_in_sandboxes = False
"""Whether what is confined begins afresh; set by `execute_in_sandboxes`, and in a server by its asker."""
compiles_quickly = False
"""Whether lesser CPU kernels are compiled as `quick_kernels` does it; in a server told by its asker."""
forks_texts = False
"""Whether ``python -c`` is forked: for tests marked `warm`."""


def execute_in_sandboxes() -> None:
    """From here on what starts in a sandbox is an interpreter of its own, as users have it."""
    global executes_in_sandboxes
    executes_in_sandboxes = True


def told_to_a_server() -> list[str]:
    told = {EXECUTES: executes_in_sandboxes, COMPILES_QUICKLY: compiles_quickly}
    return [words for words, wanted in told.items() if wanted]


def program(command: Any, folder: Any) -> list[str] | None:
    """The arguments of a Python that runs one of the lab's programs: ``["-X", "faulthandler", "-m", MODULE, ...]`` with
    ``"-P"`` or without, ``[SCRIPT, ...]``, or in a test marked `warm` ``["-c", TEXT, ...]``."""
    if isinstance(command, (str, bytes, os.PathLike)):
        return None
    words = [os.fspath(word) for word in command]
    if not all(isinstance(word, str) for word in words) or not words or words[0] != sys.executable:
        return None
    if forks_texts and words[1:2] == ["-c"]:
        return words[1:]
    options = words[1:]
    if options[:2] == ["-X", "faulthandler"]:
        options = options[2:]
    if options[:1] == ["-P"]:
        options = options[1:]
    if options and _is_own_script(Path(folder or os.getcwd(), options[0])):
        return words[1:]
    if len(options) < 2 or options[0] != "-m":
        return None
    # A sandbox that nothing runs in, as every run asks what there is, forks six times: of a small process in a third of
    # the time.
    asks_what_there_is = options[1] == SANDBOX and len(options) == 4
    sandboxes = () if executes_in_sandboxes or asks_what_there_is else (SANDBOX,)
    return words[1:] if options[1] in (COMMAND_LINE, *RUN_AS_PROGRAMS, *sandboxes) else None


def _is_own_script(path: Path) -> bool:
    return path.suffix == ".py" and path.resolve().parent in (SOURCE.parent / name for name in _SCRIPTS)


def read_by_models(
    arguments: Sequence[str], folder: Any, environment: Mapping[str, str]
) -> tuple[tuple[str, str], ...] | None:
    """Of a text or a script that names transformers, what that reads once; None of all others."""
    if arguments[0] == "-c":
        text = arguments[1]
    elif arguments[0].endswith(".py"):
        text = Path(folder or os.getcwd(), arguments[0]).read_text(encoding="utf-8")
    else:
        return None
    if "transformers" not in text:
        return None
    return tuple(
        sorted((name, value) for name, value in environment.items() if name.startswith(_READ_BY_MODELS))
    )


def finds_this_lab(path: Sequence[str]) -> bool:
    """And nothing that an interpreter would run at its start, but for a ``sitecustomize``, which a fork can run too."""
    if str(SOURCE) not in path or any(_holds(folder, _RUN_AT_THE_START) for folder in path):
        return False
    return not any(_holds(folder, _PACKAGES) for folder in path[: path.index(str(SOURCE))])


def is_customised(path: Sequence[str]) -> bool:
    return any(_holds(folder, _CUSTOMISATION) for folder in path)


def _holds(folder: str, names: tuple[str, ...]) -> bool:
    return any((Path(folder) / name).exists() for name in names)


def read_at_the_start(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What an interpreter or its libraries read once."""
    return tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if name.startswith(_READ_AT_THE_START) and name not in (*_READ_BY_THE_CHILD, *_READ_AT_USE)
        )
    )
