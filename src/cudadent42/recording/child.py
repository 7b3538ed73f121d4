"""The process that a script runs in: ``python -m cudadent42.recording.child MODE RESULT SCRIPT [ARGUMENTS]``.

MODE is ``record``, or for a replay ``without`` or ``with`` this project's kernels. The script is the process's
``__main__``; its exit code, output and exceptions are its own. However it ends, RESULT has a recording.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cudadent42.base.files import write_json
from cudadent42.base.paths import real_path
from cudadent42.recording.context import recorded, running
from cudadent42.recording.launch import RECORD, WITH
from cudadent42.recording.recorder import Recorder
from cudadent42.recording.replaced import after_import


def main(arguments: list[str]) -> None:
    mode, result, script, *others = arguments
    process = os.getpid()
    recorder = Recorder(belongs_to_command=True)
    sys.argv = others if script == "-m" else [script, *others]
    try:
        with _around(mode, recorder):
            if script == "-m":
                runpy.run_module(others[0], run_name="__main__", alter_sys=True)
            else:
                # As Python does, so that the script finds what lies beside it.
                sys.path[0] = str(real_path(Path(script)).parent)
                runpy.run_path(script, run_name="__main__")
    finally:
        if os.getpid() == process:  # and not a child of the script's
            write_json(Path(result), recorder.recording())


@contextmanager
def _around(mode: str, recorder: Recorder) -> Iterator[None]:
    if mode == RECORD:
        with recorded(recorder):
            yield
        return
    with ExitStack() as stack:
        if mode == WITH:
            stack.enter_context(_kernels())
        stack.enter_context(running(recorder))
        yield


@contextmanager
def _kernels() -> Iterator[None]:
    """PyTorch's attention and transformers' experts go to this project's kernels wherever these take them."""
    sdpa = importlib.import_module("flashmoe_science").sdpa
    with sdpa(), ExitStack() as stack:
        stack.enter_context(
            after_import({"transformers.integrations.moe": functools.partial(_take_experts, stack)})
        )
        yield


def _take_experts(stack: ExitStack, module: Any) -> None:
    interface = module.ExpertsInterface
    original = interface.get_interface

    def get_interface(self: Any, implementation: str | None, default: Any) -> Any:
        previous = original(self, implementation, default)
        ours = importlib.import_module("flashmoe_science.huggingface.experts")

        def experts(layer: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            if ours.why_not_call(layer, hidden_states, top_k_weights) is not None:
                return previous(layer, hidden_states, top_k_index, top_k_weights)
            return ours.experts_forward(layer, hidden_states, top_k_index, top_k_weights)

        return experts

    interface.get_interface = get_interface
    stack.callback(setattr, interface, "get_interface", original)


if __name__ == "__main__":
    main(sys.argv[1:])
